"""Processors of fictitious machines."""

import platform
from pathlib import Path

import pytest

from longshore.deploy.machine.processors import kernels, processor_findings
from longshore.worker.process.host_resources import quota_cores
from tests.deploy.machine.fake_host import fake_host

CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq"


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    found = {each.what: each for each in processor_findings(fake_host(tmp_path))}
    assert found["CPU"].found == "2 cores, AVX2, AVX-512, AVX-512 bfloat16, AMX bfloat16"
    assert found["CPU"].state == "ok"
    assert found["CPU quota"].found == "none"
    assert found["NUMA"].found == "node0 (4 processors)"
    assert {each.state for name, each in found.items() if name != "CPU kernels"} == {"ok"}


@pytest.mark.parametrize(
    ("files", "what", "words"),
    [
        (
            {"sys/fs/cgroup/cpu.max": "50000 100000\n"},
            "CPU quota",
            ["0.5 cores of 4 processors; a CPU worker computes with 1 thread", "limit"],
        ),
        (
            {
                "sys/devices/system/node/node0/cpulist": "0-1",
                "sys/devices/system/node/node1/cpulist": "2,3",
            },
            "NUMA",
            ["node0 (2 processors), node1 (2 processors)", "numactl --cpunodebind=0 --membind=0"],
        ),
        (
            {
                f"{CPUFREQ}/scaling_governor": "powersave",
                f"{CPUFREQ}/scaling_driver": "acpi-cpufreq",
            },
            "CPU governor",
            ["powersave", "cpupower frequency-set -g performance"],
        ),
        (
            {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"},
            "clock source",
            ["hpet", "system call"],
        ),
    ],
)
def test_what_slows_processors_is_a_warning_with_its_fix(
    tmp_path: Path, files: dict[str, str], what: str, words: list[str]
) -> None:
    found = {each.what: each for each in processor_findings(fake_host(tmp_path, files))}
    assert found[what].state == "warning"
    said = f"{found[what].found} {found[what].means} {found[what].fix}"
    assert all(word in said for word in words), said


def test_a_governor_that_tunes_itself_may_be_called_powersave(tmp_path: Path) -> None:
    files = {
        f"{CPUFREQ}/scaling_governor": "powersave",
        f"{CPUFREQ}/scaling_driver": "intel_pstate",
    }
    found = {each.what: each for each in processor_findings(fake_host(tmp_path, files))}
    assert found["CPU governor"].state == "ok"


def test_a_nodes_processors_that_this_process_may_not_use_do_not_count(tmp_path: Path) -> None:
    files = {"sys/devices/system/node/node1/cpulist": "4-7"}
    found = {each.what: each for each in processor_findings(fake_host(tmp_path, files))}
    assert (found["NUMA"].state, found["NUMA"].found) == ("ok", "node0 (4 processors)")


def test_the_tightest_control_group_around_this_process_sets_the_quota(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/system.slice/longshore.service\n",
        "sys/fs/cgroup/system.slice/cpu.max": "300000 100000",
        "sys/fs/cgroup/system.slice/longshore.service/cpu.max": "max 100000",
    }
    host = fake_host(tmp_path, files)
    assert quota_cores(host.root) == 3.0
    found = {each.what: each for each in processor_findings(host)}
    assert (found["CPU quota"].state, found["CPU quota"].found) == ("ok", "3 cores of 4 processors")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_a_processor_without_avx2_is_a_warning(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "flags : fpu sse2\n"}
    (cpu, *_) = processor_findings(fake_host(tmp_path, files))
    assert cpu.state == "warning"
    assert "without AVX2" in cpu.found


def test_kernels_that_were_not_compiled_are_a_warning(tmp_path: Path) -> None:
    assert kernels(tmp_path).state == "warning"
    assert "g++" in kernels(tmp_path).fix
    (tmp_path / "_native.cpython-311.so").touch()
    assert kernels(tmp_path).state == "ok"
