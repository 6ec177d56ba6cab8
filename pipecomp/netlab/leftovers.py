"""What a lab whose process was killed could not take down: its processes, namespaces and files."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from pipecomp.netlab import namespaces
from pipecomp.netlab.names import abandoned, folder_of, marked
from pipecomp.netlab.processes import kill


def remove_leftovers() -> list[str]:
    """Take down every lab whose process is gone; the names of those labs. NetlabError for what resists."""
    found: dict[str, list[str]] = {}
    if os.geteuid() == 0 and shutil.which("ip") is not None:
        for namespace in sorted(namespaces.namespace_names()):
            if lab := abandoned(namespace):
                found.setdefault(lab, []).append(namespace)
    folders = {lab for path in Path(tempfile.gettempdir()).glob("pclab-*") if (lab := abandoned(path.name))}
    for lab in sorted(folders | set(found)):
        own = found.get(lab, [])
        kill(lambda lab=lab, own=own: marked(lab) | namespaces.processes_in(own))  # type: ignore[misc]
        namespaces.delete_namespaces(own)
        shutil.rmtree(folder_of(lab), ignore_errors=True)
    return sorted(folders | set(found))
