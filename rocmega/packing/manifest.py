"""What a pack says of itself: manifest.json, and checksums.json beside it.

The manifest holds no time, path or machine name: the same checkpoint packed twice gives the same bytes. checksums.json
has, for each tensor, the parts that were written as [offset, bytes, CRC-32].
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rocmega import __version__
from rocmega.checkpoint.tiles import LAYOUT_TAG, LAYOUT_VERSION
from rocmega.errors import PackError
from rocmega.packing.files import PackFile
from rocmega.packing.plan import Plan
from rocmega.packing.source import Fingerprint, difference

MANIFEST, CHECKSUMS, CONFIG = "manifest.json", "checksums.json", "config.json"

Identity = dict[str, Any]


def identity(plan: Plan, rank: int, family: str, config: dict[str, Any], source: Fingerprint) -> Identity:
    """Everything that decides the bytes of one rank's pack. arch None counts as "host"."""
    return {
        "layout": {"tag": LAYOUT_TAG, "version": LAYOUT_VERSION},
        "rocmega": __version__,
        "family": family,
        "arch": plan.arch or "host",
        "tp": plan.tp,
        "rank": rank,
        "formats": plan.formats,
        "source": source,
        "config": config,
        "fields": {name: field.to_json() for name, field in plan.fields.items()},
    }


def complete(base: Identity, files: dict[str, PackFile], checksums: bytes) -> dict[str, Any]:
    """The manifest of a finished pack."""
    entries = {
        name: {"size": file.size, "header": hashlib.sha256(file.header).hexdigest()} for name, file in files.items()
    }
    return {**base, "files": entries, "checksums": hashlib.sha256(checksums).hexdigest()}


def mismatch(mine: Identity, other: Identity) -> str:
    """What the pack asked for and the one that is there differ in, with both sides; empty if in nothing."""
    names = {"layout": "layout", "rocmega": "rocmega version", "family": "family", "arch": "architecture"}
    names |= {"tp": "number of ranks", "rank": "rank", "formats": "formats"}
    for key, name in names.items():
        if mine.get(key) != other.get(key):
            return f"{name} {_shown(mine.get(key))} is asked for and {_shown(other.get(key))} is there"
    sources = difference(mine["source"], other.get("source", {}))
    if sources:
        one, two = mine["source"].get("id"), other.get("source", {}).get("id")
        return f"checkpoint {one} is asked for and {two} is there: {sources}"
    return "" if mine["fields"] == other.get("fields") else "fields"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(str(part) for part in value.values())
    return str(value)


def rank_folder(rank: int, tp: int) -> str:
    """The name of one rank's pack."""
    return f"rank-{rank}-of-{tp}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that a pack needs; PackError if it is not there or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PackError(f"{path} cannot be read ({error.strerror}): this is no pack, or not all of one.") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise PackError(f"{path} is damaged: it is no JSON object. Pack the checkpoint again.")
    return value


def to_bytes(value: dict[str, Any]) -> bytes:
    """JSON as packs have it."""
    return json.dumps(value, indent=1, sort_keys=False).encode() + b"\n"
