"""A slow network on one machine: a network namespace whose loopback has a bandwidth limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import piper

INSIDE = "PIPER_BENCH_SLOW_LINK"


def is_inside() -> bool:
    """Whether this process runs in such a namespace."""
    return INSIDE in os.environ


def why_not() -> str | None:
    """Why such a namespace cannot be created here, or None."""
    tools = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"skipped: {', '.join(tools)} not found (util-linux, iproute2)"
    tried = subprocess.run([*_NAMESPACE, "tc", "qdisc", "show"], capture_output=True, text=True)
    if tried.returncode:
        return f"skipped: no network namespace of our own here ({tried.stderr.strip()})"
    return None


def again_inside() -> int:
    """Run this program again in its own namespace; its exit status, or 0 if namespaces are not
    available here."""
    reason = why_not()
    if reason is not None:
        print(reason)
        return 0
    again = [*_NAMESPACE, sys.executable, *sys.argv]
    return subprocess.run(again, env={**os.environ, INSIDE: "1"}).returncode


def enter(mbits_per_second: float | None) -> None:
    """Continue in such a namespace with this bandwidth each way; with None, stay here."""
    if mbits_per_second is None:
        return
    if not is_inside():
        sys.exit(again_inside())
    bring_up()
    slow_down(2e6 * mbits_per_second)  # one loopback carries both directions


def bring_up() -> None:
    """Inside the namespace: bring the loopback up."""
    _run("ip", "link", "set", "lo", "mtu", "9000", "up")


def slow_down(bits_per_second: float) -> None:
    """Inside the namespace: limit the bandwidth of both directions together."""
    shape = ("rate", f"{bits_per_second:.0f}bit", "burst", "256kb", "latency", "200ms")
    _run("tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *shape)


_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def costs(mbits_per_second: float | None, workers: int) -> piper.Costs:
    """Communication costs for ``workers`` workers of this machine, over such a link."""
    found = piper.Cluster.of("CPU", workers).costs()
    if mbits_per_second is None:
        return found
    return replace(found, bytes_per_second=1e6 * mbits_per_second / 8)


def described(mbits_per_second: float | None, microbatches: int) -> str:
    """The link and the number of microbatches, for titles."""
    link = "loopback" if mbits_per_second is None else f"{mbits_per_second:g} Mbit/s"
    return f"{link}, {microbatches} microbatch{'es' * (microbatches > 1)}"
