"""All findings, in the order in which they are shown."""

from longshore.deploy.machine.finding import Finding
from longshore.deploy.machine.host import Host
from longshore.deploy.machine.packages import (
    RunProbes,
    VersionOf,
    package_findings,
    run_probes,
    version_of,
)
from longshore.deploy.machine.processors import processor_findings
from longshore.deploy.machine.resources import resource_findings


def findings(
    port: int,
    host: Host | None = None,
    *,
    versions: VersionOf = version_of,
    probe: RunProbes = run_probes,
) -> list[Finding]:
    """port: port that a server would listen on. host: None: this machine."""
    host = host or Host()
    return [
        *package_findings(host, versions, probe),
        *processor_findings(host),
        *resource_findings(host, port),
    ]
