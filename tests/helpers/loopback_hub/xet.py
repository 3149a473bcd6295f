"""The on-disk store of `hf_xet`, read from outside."""

import subprocess
import sys
from pathlib import Path

from .storage import Blob


def _merkle_hex(data: bytes) -> str:
    """Write a xet hash, which is four little-endian 64-bit numbers."""
    return "".join(data[start : start + 8][::-1].hex() for start in range(0, 32, 8))


def xet_hashes(folder: Path) -> dict[str, str]:
    """Read sha256 -> xet hash from the shards that clients wrote.

    A shard opens with a 48-byte header; each file then has a 48-byte entry (hash, flags, segment count), 48 bytes a
    segment, as many again if bit 31 of the flags is set, and its sha256 if bit 30 is; a hash of ones ends them.
    """
    hashes = {}
    for path in (folder / "xet" / "xet" / "xorbs" / "shards").glob("*.mdb"):
        data, at = path.read_bytes(), 48
        while data[at : at + 32] != b"\xff" * 32:
            file_hash = _merkle_hex(data[at : at + 32])
            flags = int.from_bytes(data[at + 32 : at + 36], "little")
            segments = int.from_bytes(data[at + 36 : at + 40], "little")
            at += 48 + 48 * segments * (2 if flags & 1 << 31 else 1)
            if flags & 1 << 30:
                hashes[_merkle_hex(data[at : at + 32])] = file_hash
                at += 48
    return hashes


XET_DOWNLOAD = """
import sys, time, hf_xet
address, file_hash, size, path = sys.argv[1:]
session = hf_xet.XetSession()
with session.new_file_download_group(
    endpoint=address, token="t", token_expiry_unix_secs=int(time.time()) + 3600) as group:
    group.start_download_file(hf_xet.XetFileInfo(file_hash, int(size)), path)
"""


def xet_download(folder: Path, blob: Blob, path: Path):
    """Rebuild a file that came in through xet, for clients without it."""
    # the store is locked by the process that opened it, so a short-lived one reads
    work = path.with_suffix(".xet")
    arguments = [f"local://{folder}/xet", blob.xet, str(blob.size), str(work)]
    subprocess.run([sys.executable, "-c", XET_DOWNLOAD, *arguments], check=True, capture_output=True)
    work.rename(path)
