"""A tokenizer for the tiny target."""

import itertools

import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer():
    """97 two-letter words, joined without spaces."""
    words = ["".join(pair) for pair in itertools.product("abcdefghij", repeat=2)][:97]
    model = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="aa"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model)
