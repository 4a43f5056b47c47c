from __future__ import annotations

import pytest

from relayrun.control.trainers.megatron_lm_log import parse_iteration, parse_save

SWISS_AI = (
    " [2026-11-22 20:54:22] iteration       20/    4000 | consumed samples:           80 | consumed tokens: 0.000B |"
    " elapsed time per iteration (ms): 58.8 | eta: 0:03:53 | tokens/sec/gpu: 4356.4 |"
    " throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: 9.999550E-04 | global batch size:     4 |"
    " lm loss: 5.544994E+00 | loss scale: 1.0 | grad norm: 0.509 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |"
)
NVIDIA = (
    " [2026-11-22 20:56:13.694391] iteration       20/    4000 | consumed samples:           80 |"
    " elapsed time per iteration (ms): 35.1 | throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: 9.999550E-04 |"
    " global batch size:     4 | lm loss: 5.544994E+00 | loss scale: 1.0 | grad norm: 0.509 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)
"""As the two checkouts print them."""


@pytest.mark.parametrize(("line", "milliseconds"), [(SWISS_AI, 58.8), (NVIDIA, 35.1)])
def test_a_line_of_progress(line: str, milliseconds: float) -> None:
    step = parse_iteration(line)
    assert step is not None
    assert (step.iteration, step.consumed_samples, step.seconds) == (20, 80, milliseconds / 1000)
    metrics = dict(step.metrics)
    assert metrics.pop("tokens_per_second_per_gpu", 4356.4) == 4356.4
    assert metrics == {
        "model_tflops_per_gpu": 0.0,
        "lr": 9.99955e-4,
        "global_batch_size": 4,
        "loss": 5.544994,
        "loss_scale": 1.0,
        "grad_norm": 0.509,
        "number_of_skipped_iterations": 0.0,
        "number_of_nan_iterations": 0.0,
    }


def test_srun_may_put_the_rank_before_it() -> None:
    step = parse_iteration("1:" + NVIDIA)
    assert step is not None
    assert step.iteration == 20


def test_a_loss_that_is_no_number_is_left_out() -> None:
    step = parse_iteration(NVIDIA.replace("5.544994E+00", "nan"))
    assert step is not None
    assert "loss" not in step.metrics


@pytest.mark.parametrize("line", ["", "iteration 3", "validation loss at iteration 20 | lm loss value: 5.5E+00 |"])
def test_other_lines_are_none(line: str) -> None:
    assert parse_iteration(line) is None


def test_the_beginning_of_a_save() -> None:
    line = "saving checkpoint at iteration      20 to /runs/a/checkpoints in torch_dist format"
    assert parse_save(line) == parse_save(f"[2026-11-22 20:56:13.695029] {line}") == 20
    assert parse_save("  successfully saved checkpoint from iteration      20 to /runs/a") is None
