"""The entry point transformers' `custom_generate=` loads from a published drafter; copied there as it is."""
