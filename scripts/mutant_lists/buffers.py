"""Defects in buffers/: message stores."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

STAGING = ("tests/stages/test_staging.py",)

MUTANTS = (
    # -- damage on the disk
    Mutant(
        "a stored value's checksum is not compared",
        "buffers/value.py",
        "if _checksum(value) != header.crc:",
        "if False:",
        ("tests/buffers/test_value.py",),
        "a flipped bit on the disk becomes part of training",
    ),
    Mutant(
        "a stored setting's checksum is not compared",
        "buffers/lmdb_file.py",
        "if crc is not None and (value is None or crc != _crc(value)):",
        "if False:",
        ("tests/buffers/test_mending.py",),
        "a flipped bit on the disk makes a store one of other settings, which no restart can open",
    ),
    Mutant(
        "a checkpoint's copy of a damaged store takes its place",
        "buffers/lmdb_store.py",
        "if (problem := unsound(saved.parent)) is not None:",
        "if (problem := None) is not None:",
        ("tests/buffers/test_mending.py",),
        "every restart loads the damage again",
    ),
    # -- staging: the double of tests/lazy_staging.py has the poisoned buffer of a copy as `target`
    Mutant(
        "a store writes without asking whether values were finite",
        "buffers/entry.py",
        "                self._settled()\n",
        "                pass\n",
        STAGING,
        "NaN is stored, and comes back with every later visit",
    ),
    Mutant(
        "no wait for m before it is stored",
        "buffers/entry.py",
        "m_nH = self._m.wait()",
        "m_nH = self._m.target",
        STAGING,
        "what is stored is not what the other end holds",
    ),
    Mutant(
        "no wait for a loaded m",
        "buffers/core.py",
        "loaded.m.wait()",
        "loaded.m.target",
        STAGING,
        "deltas of a buffer's old bytes",
    ),
    Mutant(
        "no wait before m is rounded",
        "buffers/core.py",
        "m_nH = self._staging.to_host(m_nH).wait()",
        "m_nH = self._staging.to_host(m_nH).target",
        STAGING,
        "a sample that comes twice in a micro-batch is wrong",
    ),
    Mutant(
        "no wait for a rounded m",
        "buffers/core.py",
        "self._staging.to_device(again_nH).wait()",
        "self._staging.to_device(again_nH).target",
        STAGING,
        "a sample that comes twice in a micro-batch is wrong",
    ),
)
