"""The configuration section: defaults, every refusal, and that each error names key, value and what is allowed."""

import pytest
from pydantic import ValidationError

from pipecomp.config import Activations, Config
from pipecomp.config.activations import ConstantError, bits_of_link, bits_text
from pipecomp.errors import ConfigError

EXAMPLE = {
    "activations": {
        "method": "aqsgd",
        "forward_bits": 4,
        "backward_bits": 8,
        "first_visit": "full",
        "rounding": "nearest",
        "scale": "max",
        "group_size": None,
        "backward_top_k": None,
        "eval": "full",
    },
    "store": {"backend": "lmdb", "path": "messages", "bits": 32, "max_bytes": None, "prefetch": 2},
    "transport": {"backend": "auto", "checksum": True},
}


def test_documented_example_is_accepted_and_read():
    config = Config.from_dict(EXAMPLE)
    assert config.activations == Activations(method="aqsgd")
    assert config.store.path == "messages"
    assert config.transport.checksum is True


def test_empty_section_compresses_nothing():
    config = Config.from_dict({})
    assert config.activations.method == "none"
    assert config.gradients.method == "none"


def test_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Config().seed = 1


FIRST_VISIT = ("activations.first_visit", "not with store.clusters")
RATED = {"error": 0.07, "mbit_per_s": 100}
BAD = [
    ({"activatons": {}}, "activatons", "activations"),
    ({"activations": {"methd": "none"}}, "activations.methd", "method"),
    ({"activations": {"method": "zip"}}, "activations.method", "aqsgd"),
    ({"activations": []}, "activations", "object"),
    ({"activations": {"method": "aqsgd", "forward_bits": 9}}, "activations.forward_bits", "1 to 8"),
    ({"activations": {"method": "aqsgd", "forward_bits": True}}, "activations.forward_bits", "1 to 8"),
    ({"activations": {"method": "aqsgd", "forward_bits": "4"}}, "activations.forward_bits", "1 to 8"),
    ({"activations": {"method": "aqsgd", "forward_bits": []}}, "activations.forward_bits", "one for each link"),
    ({"activations": {"method": "aqsgd", "forward_bits": [4, 9]}}, "activations.forward_bits", "1 to 8"),
    ({"activations": {"method": "aqsgd", "backward_bits": [4, "auto"]}}, "activations.backward_bits", "1 to 8"),
    ({"activations": {"method": "none", "backward_bits": [4]}}, "activations.backward_bits", "only with"),
    ({"activations": {"method": "aqsgd", "backward_bits": 0}}, "activations.backward_bits", "1 to 8"),
    ({"activations": {"method": "aqsgd", "first_visit": "half"}}, "activations.first_visit", "full"),
    ({"activations": {"method": "aqsgd", "first_visit": 9}}, "activations.first_visit", "1 to 8"),
    ({"activations": {"method": "aqsgd", "rounding": "up"}}, "activations.rounding", "stochastic"),
    ({"activations": {"method": "aqsgd", "scale": "mean"}}, "activations.scale", "rms"),
    ({"activations": {"method": "aqsgd", "group_size": 0}}, "activations.group_size", "at least 1"),
    ({"activations": {"method": "aqsgd", "backward_top_k": 0}}, "activations.backward_top_k", "above 0"),
    ({"activations": {"method": "aqsgd", "backward_top_k": 1.5}}, "activations.backward_top_k", "at most 1"),
    ({"activations": {"method": "aqsgd", "eval": "delta"}}, "activations.eval", "full"),
    ({"activations": {"method": "aqsgd", "rounding": "stochastic", "scale": "rms"}}, "activations.scale", "max"),
    ({"activations": {"method": "aqsgd", "rounding": "stochastic", "scale": "channels"}}, "activations.scale", "max"),
    ({"activations": {"method": "direct", "scale": "cached_channels"}}, "activations.scale", "'aqsgd'"),
    (
        {"activations": {"method": "aqsgd", "scale": {"backward": "cached_channels"}}},
        "activations.scale.backward",
        "'delta'",
    ),
    (
        {"activations": {"method": "aqsgd", "scale": {"backward": "channels"}, "backward_top_k": 0.2}},
        "activations.scale.backward",
        "backward_top_k",
    ),
    ({"activations": {"method": "aqsgd", "scale": {"forward": "rows"}}}, "activations.scale.forward", "channels"),
    ({"activations": {"method": "aqsgd", "scale": "channels", "gain": "none"}}, "activations.gain", "least_error"),
    ({"activations": {"method": "aqsgd", "gain": "unbiased"}}, "activations.gain", "channels"),
    ({"activations": {"method": "none", "gain": "unbiased"}}, "activations.gain", "only with"),
    (
        {"activations": {"method": "aqsgd", "forward_bits": [4, {"error": 2}]}},
        "activations.forward_bits[1].error",
        "below",
    ),
    *(
        (
            {"activations": {"method": "aqsgd", "backward_bits": {"error": 0.1, "mbit_per_s": rate}}},
            "activations.backward_bits.mbit_per_s",
            "Mbit/s above 0",
        )
        for rate in (0, -1, "100", True, 2e6, float("nan"), [], [100, 0])
    ),
    # settings that could not take effect
    (
        {"activations": {"method": "aqsgd", "first_visit": RATED}},
        "activations.first_visit.mbit_per_s",
        "follow a rate",
    ),
    (
        {"activations": {"method": "aqsgd", "backward_method": "delta", "backward_first_visit": RATED}},
        "activations.backward_first_visit.mbit_per_s",
        "follow a rate",
    ),
    (
        {"activations": {"method": "none", "eval": "direct", "forward_bits": RATED}},
        "activations.forward_bits.mbit_per_s",
        "only with method",
    ),
    (
        {"activations": {"method": "aqsgd", "forward_bits": {**RATED, "min": 1, "max": 2}}},
        "activations.forward_bits.max",
        "more than 2",
    ),
    (
        {"activations": {"method": "aqsgd", "backward_bits": {**RATED, "max": 4}}},
        "activations.backward_bits.max",
        "more than 4",
    ),
    (
        {"activations": {"method": "aqsgd", "forward_bits": [{**RATED, "mbit_per_s": [1, 2]}]}},
        "activations.forward_bits[0].mbit_per_s",
        "of this link",
    ),
    ({"activations": {"method": "none", "forward_bits": 4}}, "activations.forward_bits", "only with"),
    ({"transport": {"keys": "folder"}}, "transport.keys", "only with"),
    ({"transport": {"backend": "gloo", "keys": "folder"}}, "transport.keys", "only with"),
    ({"activations": {"method": "fp16", "backward_bits": 8}}, "activations.backward_bits", "only with"),
    ({"activations": {"method": "direct", "first_visit": 8}}, "activations.first_visit", "only with"),
    ({"activations": {"method": "none", "backward_top_k": 0.2}}, "activations.backward_top_k", "only with"),
    ({"activations": {"method": "direct"}, "store": {"backend": "memory"}}, "store", "aqsgd"),
    ({"activations": {"method": "aqsgd"}, "store": {"backend": "memory", "path": "x"}}, "store.path", "lmdb"),
    ({"activations": {"method": "aqsgd"}, "store": {"backend": "redis"}}, "store.backend", "lmdb"),
    ({"activations": {"method": "aqsgd"}, "store": {"bits": 3}}, "store.bits", "2, 4, 8, 16 or 32"),
    ({"activations": {"method": "aqsgd"}, "store": {"max_bytes": -1}}, "store.max_bytes", "above 0"),
    ({"activations": {"method": "aqsgd"}, "store": {"prefetch": -1}}, "store.prefetch", "0 to 64"),
    ({"activations": {"method": "aqsgd"}, "store": {"run": "a/b"}}, "store.run", "a name of letters"),
    ({"activations": {"method": "aqsgd"}, "store": {"path": ""}}, "store.path", "folder"),
    ({"activations": {"method": "aqsgd"}, "store": {"path": "a\0b"}}, "store.path", "zero bytes"),
    *(
        ({"activations": {"method": "aqsgd"}, "store": {"clusters": got}}, "store.clusters", "a power of two from 2")
        for got in (0, 1, 3, 1000, 2**17, True, "auto", 4.0)
    ),
    ({"activations": {"method": "direct"}, "store": {"clusters": 8}}, "store", "aqsgd"),
    ({"activations": {"method": "aqsgd", "first_visit": 8}, "store": {"clusters": 8}}, *FIRST_VISIT),
    ({"activations": {"method": "aqsgd", "first_visit": "full"}, "store": {"clusters": 8}}, *FIRST_VISIT),
    (
        {"activations": {"method": "aqsgd", "backward_method": "delta"}, "store": {"clusters": 8}},
        "activations.backward_method",
        "'direct' with store.clusters",
    ),
    ({"activations": {"method": "aqsgd"}, "store": {"clusters": 8, "bits": 8}}, "store.bits", "32 with"),
    ({"activations": {"method": "aqsgd"}, "store": {"clusters": 8, "max_bytes": 9}}, "store.max_bytes", "not with"),
    ({"activations": {"method": "aqsgd"}, "store": {"clusters": 8, "prefetch": 2}}, "store.prefetch", "not with"),
    (
        {"activations": {"method": "aqsgd"}, "store": {"clusters": 8, "on_write_error": "continue"}},
        "store.on_write_error",
        "'stop' with store.clusters",
    ),
    ({"activations": {"method": "aqsgd", "group_size": 2**32}}, "activations.group_size", "below 2**32"),
    ({"gradients": {"method": "magic"}}, "gradients.method", "none"),
    ({"gradients": {"method": []}}, "gradients.method", "none"),
    ({"gradients": {"method": "global_qsgd", "norm": 10**400}}, "gradients.norm", "2**53"),
    ({"transport": {"backend": "mpi"}}, "transport.backend", "gloo"),
    ({"transport": {"checksum": 1}}, "transport.checksum", "true or false"),
    ({"transport": {"streams": 0}}, "transport.streams", "1 to 8"),
    ({"transport": {"streams": 9}}, "transport.streams", "1 to 8"),
    ({"transport": {"streams": True}}, "transport.streams", "1 to 8"),
    ({"transport": {"streams": "many"}}, "transport.streams", "'auto'"),
    ({"transport": {"timeout_s": 0}}, "transport.timeout_s", "1 to 86400"),
    ({"transport": {"backend": "tls", "trusted_network": True}}, "transport.trusted_network", "only with"),
    ({"seed": -1}, "seed", "0 to"),
    ({"seed": 2**32}, "seed", "0 to"),
    ({"tie": "yes"}, "tie", "true or false"),
    ("aqsgd", "pipecomp", "object"),
]


@pytest.mark.parametrize(("section", "key", "allowed"), BAD, ids=[f"{b[1]}-{i}" for i, b in enumerate(BAD)])
def test_refusals_name_key_value_and_allowed(section, key, allowed):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(section)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}: got {caught.value.got!r}, allowed: ")
    assert allowed in str(caught.value)


@pytest.mark.parametrize("value", [3, [1], "x", None, True])
@pytest.mark.parametrize("section", ["activations", "gradients", "store", "transport"])
def test_a_section_is_an_object(section, value):
    with pytest.raises(ConfigError) as error:
        Config.from_dict({section: value})
    assert error.value.key == section


def test_clusters_belong_to_what_is_compared_and_stored_where_they_are_set():
    """Unset keys are not compared, as before they existed: earlier runs go on."""
    plain, clustered = (
        Config.from_dict({"activations": {"method": "aqsgd"}, "store": store}) for store in ({}, {"clusters": 256})
    )
    assert "clusters" not in plain.link_settings(0)
    assert "clusters" not in plain.shared()["store"]
    assert clustered.link_settings(0) == {**plain.link_settings(0), "clusters": 256}
    assert clustered.shared()["store"]["clusters"] == 256


AQSGD = {"method": "aqsgd"}
DELTA = {**AQSGD, "backward_method": "delta"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"seed": 1}),
        ({}, {"store": {"bits": 8}}),
        ({}, {"store": {"max_bytes": 9}}),
        ({}, {"activations": DELTA}),
        ({"activations": DELTA}, {"activations": {**DELTA, "backward_bits": 4}}),
        ({"activations": {**AQSGD, "first_visit": 8}}, {"activations": {**AQSGD, "first_visit": 8, "rotation": True}}),
        *(
            ({}, {"activations": {**AQSGD, key: value}})
            for key, value in (
                ("forward_bits", 3),
                ("first_visit", 8),
                ("rounding", "stochastic"),
                ("scale", "rms"),
                ("scale", {"forward": "channels"}),
                ("group_size", 32),
            )
        ),
    ],
    ids=str,
)
def test_ends_of_a_link_agree_on_all_that_changes_what_is_cached(one, other):
    settings = [Config.from_dict({"activations": AQSGD, **section}).link_settings(0) for section in (one, other)]
    assert settings[0] != settings[1]


def test_a_value_too_large_to_show():
    with pytest.raises(ConfigError, match=r"seed: got a int too large to show, allowed: "):
        Config.from_dict({"seed": 10**5000})


def test_scale_and_gain_of_each_direction():
    of = Config.from_dict({"activations": {**AQSGD, "scale": {"forward": "channels"}}}).activations
    assert [of.scale_of(direction) for direction in ("forward", "backward")] == ["channels", "max"]
    for dropout, gain in ((True, "least_error"), (False, "unbiased")):
        settled = of.with_dropout([dropout])
        assert [settled.gain_of(direction) for direction in ("forward", "backward")] == [gain, "least_error"]
    both = Config.from_dict(
        {"activations": {**AQSGD, "scale": "channels", "gain": {"forward": "unbiased"}}}
    ).activations
    settled = both.with_dropout([True])
    assert [settled.gain_of(direction) for direction in ("forward", "backward")] == ["unbiased", "unbiased"]


def test_settings_without_new_keys_compare_with_checkpoints_from_before():
    shared = Config.from_dict({"activations": AQSGD}).shared()
    assert "gain" not in shared["activations"]
    assert shared["activations"]["scale"] == "max"


def test_direct_evaluation_may_set_forward_bits_without_a_quantized_method():
    config = Config.from_dict({"activations": {"method": "none", "eval": "direct", "forward_bits": 3}})
    assert config.activations.forward_bits == 3


def test_bits_of_each_link():
    section = {"activations": {"method": "aqsgd", "forward_bits": [4, 2, 8], "backward_bits": 6}}
    config = Config.from_dict(section)
    assert [config.activations.bits(link) for link in range(3)] == [(4, 6), (2, 6), (8, 6)]
    assert [config.link_settings(link)["forward_bits"] for link in range(3)] == [4, 2, 8]
    assert hash(config) == hash(Config.from_dict(section))
    config.activations.check_links(3)
    with pytest.raises(ConfigError, match=r"forward_bits: got \[4, 2, 8\], allowed: one number, or 1: .* 2 stages"):
        config.activations.check_links(1)
    with pytest.raises(ConfigError, match="a number for link 3 too"):
        config.activations.bits(3)
    assert bits_text(config.activations.forward_bits) == "4/2/8"
    assert bits_text(config.activations.backward_bits) == "6"


def test_rates_of_links():
    section = {"activations": {"method": "aqsgd", "forward_bits": {**RATED, "mbit_per_s": [100, 2.5]}}}
    config = Config.from_dict(section)
    a = config.activations
    assert (a.measured("forward_bits"), a.measured("backward_bits")) == (True, False)
    assert bits_text(a.forward_bits) == "2 to 8 (error 0.07, within 100/2.5 Mbit/s)"
    assert bits_of_link(a.forward_bits, 1) == ConstantError(error=0.07, mbit_per_s=2.5)
    assert Activations(**config.shared()["activations"]) == a
    # What a store holds does not depend on what its owner knows of the line; a run's settings do.
    assert config.link_settings(1)["forward_bits"] == {"error": 0.07, "min": 2, "max": 8}
    assert (
        config.digest() != Config.from_dict({"activations": {**section["activations"], "forward_bits": RATED}}).digest()
    )
    a.check_links(2)
    with pytest.raises(ConfigError, match=r"forward_bits\.mbit_per_s: got \[100, 2\.5\], allowed: one number, or 1: "):
        a.check_links(1)
    with pytest.raises(ConfigError, match="settles 'auto' and mbit_per_s"):
        a.bits(0)


def test_links_may_have_numbers_and_errors():
    config = Config.from_dict({"activations": {"method": "direct", "backward_bits": [4, {"error": 0.1, "max": 6}]}})
    a, second = config.activations, ConstantError(error=0.1, max=6)
    assert [a.bits(link)[1] for link in (0, 1)] == [4, second]
    assert not a.measured("backward_bits")
    assert Activations(**config.shared()["activations"]) == a
    assert a.replace(backward_bits=(second, 8)).bits(0)[1] == second
    assert bits_text(a.backward_bits) == "4/2 to 6 (error 0.1)"


def test_digest_differs_with_any_setting_but_the_stores_place():
    base = Config.from_dict(EXAMPLE)
    elsewhere = {**EXAMPLE, "store": {**EXAMPLE["store"], "path": "/other"}}
    assert Config.from_dict(elsewhere).digest() == base.digest()
    other = {**EXAMPLE, "activations": {**EXAMPLE["activations"], "forward_bits": 3}}
    assert Config.from_dict(other).digest() != base.digest()


def test_streams_are_compared_only_where_they_are_given():
    assert "streams" not in Config().shared()["transport"], "as checkpoints know it"
    assert Config.from_dict({"transport": {"streams": 4}}).shared()["transport"]["streams"] == 4
