"""Collectives by the number of ranks and domains."""

import dataclasses

import pytest

from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.interconnect import NETWORK_SHARE, Interconnect
from tests.simulated.batches import cost_model

B200, GB200 = (Interconnect(load_hardware(name)) for name in ("b200", "gb200"))
LINK = B200.hardware.constants.network * B200.hardware.link_bandwidth
NETWORK = NETWORK_SHARE * B200.hardware.network_bandwidth
MESSAGE = 2**28


def test_a_domain_is_a_server_or_a_rack():
    assert [B200.domains(ranks) for ranks in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    assert [GB200.domains(ranks) for ranks in (1, 64, 72, 73)] == [1, 1, 1, 2]
    assert B200.domains(2, first=7) == 2


def test_one_rank_and_no_bytes_take_no_time():
    for collective in (B200.all_reduce, B200.all_to_all, B200.all_gather):
        assert collective(1, MESSAGE).seconds == collective(8, 0).seconds == 0
    assert B200.stage_transfers(8, 1, MESSAGE).seconds == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_within_a_domain_the_bytes_are_those_of_a_ring(ranks):
    assert B200.all_reduce(ranks, MESSAGE).flow_s == pytest.approx(2 * (ranks - 1) / ranks * MESSAGE / LINK)
    assert B200.all_to_all(ranks, MESSAGE).flow_s == pytest.approx((ranks - 1) / ranks * MESSAGE / LINK)
    assert B200.all_gather(ranks, MESSAGE / ranks).flow_s == pytest.approx((ranks - 1) / ranks * MESSAGE / LINK)


def test_two_servers_reduce_their_sums_over_the_network():
    one, two = B200.all_reduce(8, MESSAGE), B200.all_reduce(16, MESSAGE)

    assert two.flow_s - one.flow_s == pytest.approx(2 / 2 * MESSAGE / 8 / NETWORK)
    assert two.latency_s - one.latency_s == pytest.approx(2 * B200.hardware.network_latency_s)
    assert GB200.all_reduce(16, MESSAGE).seconds < 0.6 * two.seconds


def test_most_of_an_exchange_of_two_servers_crosses_the_network():
    two = B200.all_to_all(16, MESSAGE)

    assert two.flow_s == pytest.approx(MESSAGE / 2 / NETWORK)
    assert two.bytes == MESSAGE * 15 / 16
    assert GB200.all_to_all(16, MESSAGE).flow_s == pytest.approx(MESSAGE * 15 / 16 / LINK)


def test_stages_in_another_server_send_over_the_network():
    assert B200.stage_transfers(4, 2, MESSAGE).flow_s == pytest.approx(MESSAGE / LINK)
    assert B200.stage_transfers(8, 2, MESSAGE).flow_s == pytest.approx(MESSAGE / NETWORK)
    assert B200.stage_transfers(4, 4, MESSAGE).flow_s == pytest.approx(2 * MESSAGE / LINK + MESSAGE / NETWORK)
    assert B200.stage_transfers(4, 4, MESSAGE).latency_s == B200.hardware.network_latency_s
    assert B200.stage_transfers(1, 9, MESSAGE).flow_s == pytest.approx(7 * MESSAGE / LINK + MESSAGE / NETWORK)
    assert GB200.stage_transfers(8, 9, MESSAGE).latency_s == 0


def test_sixteen_gpus_of_two_servers_are_slower_than_of_a_rack():
    def all_reduces(device, **changes):
        model = cost_model("llama-3.1-405b", device, dtype="fp8", tp_size=8, **changes)
        return next(one for one in model.of_tokens(2048) if one.name == "all-reduces").seconds

    apart = Interconnect(dataclasses.replace(GB200.hardware, link_domain=4))
    assert apart.all_reduce(8, MESSAGE).seconds > 2 * GB200.all_reduce(8, MESSAGE).seconds
    assert all_reduces("gb200") == pytest.approx(all_reduces("b200"))
