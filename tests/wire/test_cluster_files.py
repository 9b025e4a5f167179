"""The files of docs/guides/clusters.md parse, and start commands that exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from onefold.app.cli.main import _parser

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "cluster"
GUIDE = (ROOT / "docs" / "guides" / "clusters.md").read_text()
SLURM = (FILES / "slurm.sbatch").read_text()


def onefold_flags(words):
    """The parsed command line behind `-m onefold`; an unknown or wrong flag is an error."""
    place = words.index("onefold")
    assert words[place - 1] == "-m"
    return _parser().parse_args(words[place + 1 :])


def torchrun_flags(words):
    from torch.distributed.run import get_args_parser

    place = words.index("torchrun")
    told = get_args_parser().parse_args(words[place + 1 :])
    assert told.module
    assert told.training_script == "onefold"
    return told


def test_the_command_of_the_guide_is_the_one_that_make_cluster_types():
    import cluster
    from hosts import Hosts

    block = re.search(r"```console\n\$ (torchrun.*?)```", GUIDE, re.S)
    typed = shlex.split(block[1].replace("\\\n", " "))
    hosts = Hosts(2)
    train = ("-m", "onefold", "train", *cluster.TRAIN, "--report", "build/cluster")
    assert typed == hosts.command(hosts[0], *train, ranks=2)
    assert torchrun_flags(typed).master_addr == hosts[0].address
    assert onefold_flags(typed).model == "tiny"


def test_the_guide_names_files_that_exist_and_the_readme_names_the_guide():
    for path in re.findall(r"(?:examples|benchmarks|tests)/[\w/.]+\w", GUIDE):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([\w/.-]+)[)#]", GUIDE):
        assert (ROOT / "docs" / "guides" / link).exists(), link
    assert "(docs/guides/clusters.md)" in (ROOT / "README.md").read_text()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_is_bash():
    done = subprocess.run(
        ["bash", "-n", str(FILES / "slurm.sbatch")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_slurm_script_asks_for_one_torchrun_a_node_and_an_early_sigterm():
    lines = SLURM.splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = [line.split(maxsplit=1)[1] for line in lines if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", each) for each in asked), asked
    told = dict(each.removeprefix("--").partition("=")[::2] for each in asked)
    assert told["ntasks-per-node"] == "1"
    assert int(told["nodes"]) > 1
    number, seconds = told["signal"].split("@")
    assert number == "TERM"
    # sbatch reads no more directives behind the first command
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    assert seconds.isdecimal()


FAKES = {
    "scontrol": "echo node-0; echo node-1",
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        if [[ $1 == hostname ]]; then echo "10.1.2.3 172.17.0.1 "; exit; fi
        for node in 0 1; do SLURM_NODEID=$node "$@"; done""",
    "torchrun": """printf '%s\\n' "$PET_SHUTDOWN_TIMEOUT" torchrun "$@" end""",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_starts_torchrun_with_each_nodes_rank(tmp_path, monkeypatch):
    for name, body in FAKES.items():
        fake = tmp_path / name
        fake.write_text(f"#!/bin/bash\n{body}\n")
        fake.chmod(0o755)
    given = {"JOB_NODELIST": "node-[0-1]", "JOB_ID": "123456", "JOB_NUM_NODES": "2",
             "CPUS_PER_TASK": "16", "GPUS_ON_NODE": "8"}  # fmt: skip
    env = {f"SLURM_{name}": value for name, value in given.items()}
    done = subprocess.run(
        ["bash", str(FILES / "slurm.sbatch")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/me", **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    typed = [words.split("\n") for words in done.stdout.split("\nend\n") if words]
    grace = int(typed[0][0])  # which torchrun reads as a flag
    assert grace < int(re.search(r"--signal=TERM@(\d+)", SLURM)[1])
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", str(grace))
    runs = [torchrun_flags(words) for words in typed]
    assert [run.node_rank for run in runs] == [0, 1]
    for run, words in zip(runs, typed, strict=True):
        assert (run.nnodes, run.nproc_per_node) == ("2", "8")
        assert (run.master_addr, run.master_port) == ("10.1.2.3", 23456)
        assert getattr(run, "shutdown_timeout", grace) == grace  # torch 2.11 has no such flag
        assert onefold_flags(words).checkpoint == "/home/me/runs/onefold-123456"
        assert onefold_flags(words).resume


def test_the_trainjob_has_the_fields_of_kubeflow_trainer_v2():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((FILES / "trainjob.yaml").read_text())
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["kind"] == "TrainJob"
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert set(spec) <= {"runtimeRef", "initializer", "trainer", "runtimePatches", "suspend"}
    assert spec["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": "torch-distributed",
    }
    trainer = spec["trainer"]
    assert set(trainer) <= {"image", "command", "args", "env", "numNodes", "resourcesPerNode"}
    assert trainer["numNodes"] > 1
    assert all(isinstance(word, str) for word in trainer["command"])
    run = torchrun_flags(trainer["command"])
    assert not any(
        word.startswith(("--nn", "--node", "--master", "--nproc")) for word in trainer["command"]
    )
    assert run.training_script_args[0] == "train"
    flags = onefold_flags(trainer["command"])
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"
    assert set(container) <= {"name", "volumeMounts", "securityContext"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert any(flags.checkpoint.startswith(path) for path in mounts.values())


def test_the_ray_script_compiles_and_calls_what_the_installed_ray_has():
    tree = ast.parse((FILES / "ray_train.py").read_text())
    called = {
        node.func.id: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called["TorchTrainer"] == {
        "train_loop_config", "torch_config", "scaling_config", "run_config",
    }  # fmt: skip
    pytest.importorskip("ray.train.torch")
    from inspect import signature

    import ray.train
    import ray.train.torch

    for name in ("TorchTrainer", "TorchConfig", "ScalingConfig", "RunConfig"):
        found = vars(ray.train).get(name) or vars(ray.train.torch)[name]
        assert called[name] <= set(signature(found).parameters), name
