"""The files of deploy/: their commands are the program's own, and read what is mounted."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cli import serve

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def assert_served(arguments: list[str], mounts: list[str]) -> None:
    """Asserts that ``octavo serve`` knows these arguments, and that each path among them is in a mount."""
    serve.make_parser().read(arguments)
    paths = [path for argument in arguments for path in re.findall(r"(?:^|=)(/.*)", argument)]
    assert paths
    for path in paths:
        assert any(Path(path).is_relative_to(mount) for mount in mounts), f"{path} is in none of {mounts}"


def test_the_command_of_the_dockerfile_mounts_what_it_reads() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    [command] = re.findall(r"docker run (?:.*\\\n)*.*--api-key-file.*", text)
    words = shlex.split(re.sub(r"\\\n#", " ", command))
    mounts = [word.split(":")[1] for option, word in pairwise(words) if option == "-v"]
    assert_served(words[words.index("octavo") + 1 :], mounts)


def test_what_the_image_downloads_is_kept_in_its_volume() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    [volume] = re.findall(r"^VOLUME (.*)$", text, re.MULTILINE)
    for name in ("OCTAVO_CACHE", "HF_HOME"):
        [folder] = re.findall(rf"\b{name}=(\S+)", text)
        assert Path(folder).is_relative_to(volume), f"{name} is {folder}"


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "octavo.yaml").read_text()))
    [deployment] = [document for document in documents if document["kind"] == "Deployment"]
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def test_the_pod_mounts_what_its_command_reads(pod: dict[str, Any]) -> None:
    [container] = pod["containers"]
    assert_served(container["args"], [mount["mountPath"] for mount in container["volumeMounts"]])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_pod_takes_an_image_that_is_on_its_node(pod: dict[str, Any]) -> None:
    assert pod["containers"][0]["imagePullPolicy"] == "IfNotPresent", "by default 'latest' is pulled from a registry"
