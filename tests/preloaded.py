"""Imported once by the server that forks the ranks of tests: what each of them would import or find out again."""

from __future__ import annotations

import deepspeed
import setuptools._distutils.core  # noqa: F401  of DeepSpeed's look at what could be compiled here

deepspeed.ops.__compatible_ops__  # noqa: B018  runs compilers when it is first read
