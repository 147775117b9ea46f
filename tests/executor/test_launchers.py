"""Workers that something else has started: torchrun, and Ray on one machine or several."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.executor.worker import Worker, WorkerSpec
from octavo.models.config_files import read_model_config
from tests.busy_machine import PATIENCE

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 2,
    "block_size": 4,
    "num_gpu_blocks_override": 36,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
}
PROMPTS = ["ab", "the quick brown fox jumps over the lazy dog", "c" * 33]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True, logprobs=1) for t in (0.0, 1.0, 0.5)]


def answers(llm: LLM) -> list[Any]:
    """Tokens and logprobs, as JSON gives them."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        [o.outputs[0].token_ids, [next(iter(p.values())).logprob for p in o.outputs[0].logprobs or []]] for o in outputs
    ]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[Any]:
    return answers(LLM(str(tiny_model), **OPTIONS))


def launch_as_torchrun(words: list[str], environment: dict[str, str]) -> str:
    """Runs two processes with the variables that torchrun sets; what the second one says."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in (0, 1):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        told = {**environment, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in variables.items()}}
        ranks.append(subprocess.Popen([sys.executable, *words], env=told, stderr=subprocess.PIPE, text=True))
    return [rank.communicate(timeout=PATIENCE)[1] for rank in ranks][1]


def launch_with_torchrun(words: list[str], environment: dict[str, str]) -> str:
    """Runs two processes of torchrun; what it says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE).stderr


@pytest.mark.parametrize("launch", [launch_as_torchrun, pytest.param(launch_with_torchrun, marks=pytest.mark.slow)])
def test_processes_of_a_launcher_reach_the_same_answers_and_notice_when_they_disagree(
    launch: Callable[[list[str], dict[str, str]], str], tiny_model: Path, alone: list[Any], tmp_path: Path
) -> None:
    script = Path(__file__).with_name("launched.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    stderr = launch([str(script), str(tiny_model), str(tmp_path)], environment)
    said = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert sorted(each["rank"] for each in said) == [0, 1], stderr[-2000:]
    for each in said:
        assert each["answers"] == alone
        assert "the plans of step" in each["error"] and "those of ranks [1] are not that of rank 0" in each["error"]


@contextmanager
def without_torch(**environment: object) -> Iterator[None]:
    """No import of torch succeeds, as where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        for name, value in environment.items():
            patch.setenv(name, str(value))
        yield


def launched(world: int) -> dict[str, object]:
    """What a launcher tells the first of its processes."""
    ranks = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": world}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}


def test_the_only_process_of_a_launcher_needs_no_torch(tiny_model: Path, alone: list[Any]) -> None:
    with without_torch(**launched(1)):
        llm = LLM(str(tiny_model), **OPTIONS, distributed_executor_backend="external_launcher")
        given = answers(llm)
        llm.llm_engine.core.shutdown()
    assert given == alone


def test_processes_of_a_launcher_say_that_they_need_torch(tiny_model: Path) -> None:
    options = {**OPTIONS, "distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
    with without_torch(**launched(2)), pytest.raises(ConfigError, match=r"octavo\[torch\]"):
        LLM(str(tiny_model), **options)


@pytest.mark.parametrize("connect", [Worker.open_store, Worker.init_device])
def test_workers_of_several_machines_say_that_they_need_torch(
    connect: Callable[[Worker], object], tiny_model: Path
) -> None:
    options = make_config(model=str(tiny_model), **OPTIONS, tensor_parallel_size=2)
    worker = Worker(WorkerSpec.of(options, read_model_config(tiny_model), tiny_model, "float32"))
    with without_torch(), pytest.raises(ConfigError, match=r"octavo\[torch\]"):
        connect(worker)


# --- Ray -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two machines, both this one."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    made.add_node(num_cpus=2)
    ray.init(address=made.address, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_actors_give_the_answers_of_one_process(
    ranks: int, stages: int, cluster: Any, tiny_model: Path, alone: list[Any]
) -> None:
    llm = LLM(
        str(tiny_model),
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        distributed_executor_backend="ray",
        **OPTIONS,
    )
    assert answers(llm) == alone
    llm.llm_engine.core.shutdown()


@pytest.mark.slow
def test_too_small_a_cluster_is_refused_with_its_size(cluster: Any, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 8 CPUs, but the Ray cluster has 4"):
        LLM(str(tiny_model), pipeline_parallel_size=8, distributed_executor_backend="ray", **OPTIONS)


@pytest.mark.slow
def test_answers_go_on_when_an_actor_is_lost(cluster: Any, tiny_model: Path, alone: list[Any]) -> None:
    import ray

    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", **OPTIONS}
    llm = LLM(str(tiny_model), **options, engine_restarts=1)

    def lose_an_actor() -> None:
        executor: Any = llm.core.executor
        ray.kill(executor._workers[1])

    lose_an_actor()
    assert answers(llm) == alone
    lose_an_actor()
    with pytest.raises(EngineDeadError, match=r"worker 1 is lost|closed its connection"):
        answers(llm)


@pytest.mark.slow
def test_answers_go_on_where_a_cluster_has_another_machine(cluster: Any, tiny_model: Path, alone: list[Any]) -> None:
    from ray.util import placement_group_table

    cluster.add_node(num_cpus=2)
    sizes: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    llm = LLM(str(tiny_model), distributed_executor_backend="ray", **sizes, **OPTIONS)

    def lose_a_machine() -> None:
        executor: Any = llm.core.executor
        used = placement_group_table(executor._group)["bundles_to_node_id"].values()
        cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id in used))

    lose_a_machine()
    assert answers(llm) == alone
    lose_a_machine()
    with pytest.raises(EngineDeadError, match=r"needs 4 CPUs, but the Ray cluster has 2"):
        answers(llm)
