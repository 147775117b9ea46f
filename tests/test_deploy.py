"""The files of deploy/: their commands are the program's own, and read what is mounted."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cli import serve
from octavo.config.engine_config import EngineConfig
from octavo.config.server_options import ServerOptions
from octavo.config.sources import RESERVED_VARIABLES

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def assert_served(arguments: list[str], mounts: list[str]) -> None:
    """Asserts that ``octavo serve`` knows these arguments, and that each path among them is in a mount."""
    serve.make_parser().read(arguments)
    paths = [path for argument in arguments for path in re.findall(r"(?:^|=)(/.*)", argument)]
    assert paths
    for path in paths:
        assert any(Path(path).is_relative_to(mount) for mount in mounts), f"{path} is in none of {mounts}"


DOCKERFILES = pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])


@DOCKERFILES
def test_the_command_at_the_head_of_a_dockerfile_mounts_what_it_reads(name: str) -> None:
    text = (DEPLOY / name).read_text()
    [command] = re.findall(r"docker run (?:.*\\\n)*.*smollm2-135m.*", text)
    words = shlex.split(re.sub(r"\\\n#", " ", command))
    image = next(i for i, word in enumerate(words) if word in ("octavo", "octavo-cuda"))
    serve.make_parser().read(words[image + 1 :])
    mounts = [word.split(":")[1] for option, word in pairwise(words) if option == "-v"]
    for path in re.findall(r"(?:^| )(/\S+)", " ".join(words[image + 1 :])):
        assert any(Path(path).is_relative_to(mount) for mount in mounts), f"{path} is in none of {mounts}"


@DOCKERFILES
def test_what_an_image_downloads_is_kept_in_its_volume(name: str) -> None:
    text = (DEPLOY / name).read_text()
    [volume] = re.findall(r"^VOLUME (.*)$", text, re.MULTILINE)
    for variable in ("OCTAVO_CACHE", "HF_HOME"):
        [folder] = re.findall(rf"\b{variable}=(\S+)", text)
        assert Path(folder).is_relative_to(volume), f"{variable} is {folder}"


@DOCKERFILES
def test_an_image_runs_without_rights_and_says_whether_it_is_well(name: str) -> None:
    """Of hadolint's rules those that matter, for machines without it."""
    text = (DEPLOY / name).read_text()
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER [1-9]\d*$", last, re.MULTILINE), "DL3002, and Kubernetes' runAsNonRoot wants a number"
    assert re.search(r'^HEALTHCHECK .*\\\n  CMD \[".*/health', last, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["octavo", "serve"\]$', last, re.MULTILINE), "DL3025: signals reach the server"
    assert not re.search(r"^FROM \S+(:latest)?$(?<!\d)(?<!-slim)", text, re.MULTILINE), "DL3006, DL3007"
    for line in re.findall(r"apt-get install.*", text):
        assert "--no-install-recommends" in line and "rm -rf /var/lib/apt/lists" in line, "DL3015, DL3009"
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((DEPLOY.parent / path).exists() for path in source.split())


def of_the_extra_release(name: str) -> str:
    """The path of a program that the extra brings."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (program := shutil.which(name, path=path)) is None:
        pytest.skip(f"{name} is not installed (the extra release)")
    return program


@pytest.mark.slow
@DOCKERFILES
def test_hadolint_has_nothing_to_say(name: str) -> None:
    subprocess.run([of_the_extra_release("hadolint"), str(DEPLOY / name)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "file"),
    [("compose-spec", "deploy/docker-compose.yml"), ("github-workflows", ".github/workflows/release.yml")],
)
def test_a_file_has_the_form_that_its_schema_wants(schema: str, file: str) -> None:
    program = of_the_extra_release("check-jsonschema")
    subprocess.run([program, "--builtin-schema", f"vendor.{schema}", str(DEPLOY.parent / file)], check=True)


def test_compose_mounts_files_that_there_are() -> None:
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "reached from this machine alone"
    assert (DEPLOY / services["octavo"]["build"]["context"] / services["octavo"]["build"]["dockerfile"]).exists()
    serve.make_parser().read(services["octavo"]["command"])


def test_prometheus_scrapes_the_service_and_reads_the_rules() -> None:
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    assert all((DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])


def test_grafana_finds_the_dashboard_where_it_is_mounted() -> None:
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "octavo.yml").read_text())["providers"]
    mounts = {parts[1]: parts[0] for parts in (text.split(":") for text in services["grafana"]["volumes"])}
    assert (DEPLOY / mounts[provider["options"]["path"]] / "grafana.json").exists()
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"].split("//")[1].split(":")[0] in services


def test_the_unit_runs_a_command_that_there_is() -> None:
    text = (DEPLOY / "systemd" / "octavo.service").read_text()
    [command] = re.findall(r"^ExecStart=\S+/octavo serve (.*)$", text, re.MULTILINE)
    serve.make_parser().read(command.split())
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    assert unit["Service"]["NoNewPrivileges"] == "yes" and unit["Service"]["User"] == "octavo"
    options = re.findall(r"OCTAVO_(\w+)=", text)
    known = {
        *ServerOptions.model_fields,
        *EngineConfig.model_fields,
        *(n.removeprefix("OCTAVO_").lower() for n in RESERVED_VARIABLES),
    }
    assert {option.lower() for option in options} <= known


def test_systemd_has_nothing_to_say_of_the_unit(tmp_path: Path) -> None:
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "octavo.service").read_text()
    unit = tmp_path / "octavo.service"
    unit.write_text(text.replace("/opt/octavo/bin/octavo", sys.executable))
    done = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_the_pod_is_asked_about_loading_before_it_is_asked_whether_it_lives(pod: dict[str, Any]) -> None:
    [container] = pod["containers"]
    probes = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/version"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600, "a model is fetched in minutes"
    assert pod["securityContext"]["runAsNonRoot"]


def test_the_pod_gets_no_variables_that_look_like_options(pod: dict[str, Any]) -> None:
    """Kubernetes tells pods of each service NAME by NAME_PORT=tcp://..., and that of this one is named octavo."""
    assert pod["enableServiceLinks"] is False


@pytest.mark.slow
def test_the_manifests_have_the_form_that_kubernetes_wants() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / "octavo.yaml").read_text()):
        validate.validate(document, validate.latest_version(), strict=True)
