"""A cost model fitted to a running server is one that the simulator takes."""

from pathlib import Path

import msgspec

from longshore.deploy.bench.fit_cost import run
from longshore.deploy.bench.options import FitCostOptions
from longshore.deploy.cli.simulate import run as simulate
from longshore.deploy.simulator.options import SimulateOptions
from tests.integration.deployment import Deployment


def test_the_simulator_takes_a_model_fitted_to_a_server(
    deployment: Deployment, tmp_path: Path
) -> None:
    output, result = tmp_path / "cost-model.json", tmp_path / "result.json"
    options = FitCostOptions(
        url=deployment.url,
        output=output,
        batch_sizes=(1, 2),
        prompt_lens=(16, 128),
        output_len=128,  # fewer may all have come before a busy machine reads the first one
        repeats=2,
    )
    run(options)
    fit = msgspec.json.decode(output.read_bytes())["fit"]
    assert [point["name"] for point in fit["points"]] == [
        "first token after a prompt of 16",
        "first token after a prompt of 128",
        "token of 1 requests with prompts of 64",
        "token of 1 requests with prompts of 16",
        "step with a prompt of 128 beside 1 decodes",
        "token of 2 requests with prompts of 64",
        "token of 2 requests with prompts of 16",
        "step with a prompt of 128 beside 2 decodes",
    ]
    assert all(point["measured_s"] > 0 for point in fit["points"])
    simulate(SimulateOptions(cost_model=str(output), num_blocks=4000, num_requests=5, json=result))
    assert msgspec.json.decode(result.read_bytes())["requests"]["completed"] == 5
