from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.errors import ConfigError, SchedulerError, SpecError
from schedulers.hosts.host_list import Host, expand, parse_hostfile, parse_hosts

ALIASES = ("gpu1", "gpu2", "login", "gpu10")


def _written(text: str, **more: object) -> list[str]:
    return [str(host) for host in parse_hosts(text, aliases=ALIASES)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b,c", ["a", "b", "c"]),
        (" a , b\nc ", ["a", "b", "c"]),
        ("bob@a:2222", ["bob@a:2222"]),
        ("bob@corp.example@a", ["bob@corp.example@a"]),
        ("[fd00::1]:22,fd00::2,bob@[fe80::1%eth0]", ["[fd00::1]:22", "[fd00::2]", "bob@[fe80::1%eth0]"]),
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[9-11]", ["gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("gpu[1,4-5]:7,x", ["gpu1:7", "gpu4:7", "gpu5:7", "x"]),
        ("r[1-2]n{a,b}", ["r1na", "r1nb", "r2na", "r2nb"]),
        ("n{08..10}.lab", ["n08.lab", "n09.lab", "n10.lab"]),
        ("gpu*", ["gpu1", "gpu2", "gpu10"]),
        ("gpu?", ["gpu1", "gpu2"]),
        ("bob@gpu?", ["bob@gpu1", "bob@gpu2"]),
        ("gpu2,gpu*", ["gpu2", "gpu1", "gpu10"]),
        ("gpu*,gpu2", ["gpu1", "gpu10", "gpu2"]),
        ("127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_a_list_names_hosts_in_its_order(text: str, expected: list[str]) -> None:
    assert _written(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        (" , ", "names no host"),
        ("a,a", "'a' is listed twice"),
        ("a[1-2],a2", "'a2' is listed twice"),
        (
            "logim*",
            "'logim*' matches no Host entry of the SSH configuration; did you mean 'login'? (it has gpu1, gpu2,",
        ),
        ("a:0", "'0' is not a port (1 to 65535)"),
        ("a:65536", "'65536' is not a port"),
        ("a:ssh", "'ssh' is not a port"),
        ("-oProxyCommand=x", "not a host name"),
        ("a b;c", "'b;c' is not a host name"),
        ("-u@a", "'-u' is not a user name"),
        ("@a", "'' is not a user name"),
        ("a[3-1]", "the range 3-1 runs backwards"),
        ("a[1-2", "a bracket without its other half"),
        ("a]", "a bracket without its other half"),
        ("a[]", "'' is not a number or a range"),
        ("a[x]", "'x' is not a number or a range"),
        ("a[1-99999]", "more than 10000 hosts"),
        ("a[1-200]b[1-200]", "names 40000 hosts"),
        ("[fd00::1]22", "is written [fd00::1] or [fd00::1]:22"),
        ("1:2:3", "an IPv6 address is written"),
        ("gpü", "not a host name"),
    ],
)
def test_what_names_no_host_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_hosts(text, aliases=ALIASES)
    assert said in str(error.value)
    assert str(error.value).startswith("--hosts: ")
    assert "\n" not in str(error.value)


def test_hostfiles_of_three_programs() -> None:
    text = """\
    # Open MPI, DeepSpeed
    gpu1 slots=8
    gpu2 slots = 4 max_slots=8   # a smaller one
    bob@gpu3:2
    gpu4

    gpu[05-06] slots=1 port=2222
    [fd00::1]:4
    fd00::2 slots=3 user=eve
    gpu4
    gpu1 slots=1
    """
    hosts = parse_hostfile(text, "hosts.txt")
    assert [(str(host), host.slots) for host in hosts] == [
        ("gpu1", 9),
        ("gpu2", 4),
        ("bob@gpu3", 2),
        ("gpu4", 2),
        ("gpu05:2222", 1),
        ("gpu06:2222", 1),
        ("[fd00::1]", 4),
        ("eve@[fd00::2]", 3),
    ]
    assert hosts[1].source == "hosts.txt:3"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "hosts: names no host"),
        ("# nothing\n", "hosts: names no host"),
        ("a slot=8", "hosts:1: 'slot=8' is not a setting; did you mean 'slots'?"),
        ("a\nb 8", "hosts:2: '8' is not a setting"),
        ("a slots 4", "hosts:1: 'slots' is not a setting; it has no value (settings: "),
        ("a slots=0", "hosts:1: 'a': '0' is not a number of slots (1 to 1024)"),
        ("a slots=all", "'all' is not a number of slots"),
        ("a:2222", "in a hostfile the number after ':' is slots, a port is port=N"),
        ("a:2 slots=2", "hosts:1: 'a:2' has its slots twice"),
        ("a slots=8 max_slots=4", "slots=8 is more than max_slots=4"),
        ("a slots=8 slots=8", "slots is set twice"),
        ("a\nbob@a", "hosts:2: a as bob is at hosts:1 as the default user"),
        ("bob@a user=eve", "has two users: bob, and eve"),
        ("gpu*", "hosts:1: 'gpu*': patterns are for --hosts"),
        ("a\n-x", "hosts:2: '-x' is not a host name"),
    ],
)
def test_what_is_not_a_hostfile_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hostfile(text, "hosts")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(0, 300), st.integers(1, 6))
def test_a_range_is_what_counting_gives(first: int, more: int, width: int) -> None:
    start = f"{first:0{width}d}"
    expected = [
        f"n{number:0{len(start) if start.startswith('0') else 0}d}" for number in range(first, first + more + 1)
    ]
    assert list(expand(f"n[{start}-{first + more}]")) == expected


names = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)
hosts = st.builds(
    Host,
    name=names | st.ip_addresses().map(str),
    user=st.none() | names,
    port=st.none() | st.integers(1, 65535),
)


@settings(deadline=None)
@given(st.lists(hosts, min_size=1, max_size=8, unique_by=lambda host: (host.name, host.port)))
def test_hosts_can_be_written_and_read_back(given_hosts: list[Host]) -> None:
    assert parse_hosts(",".join(map(str, given_hosts))) == given_hosts


@settings(deadline=None)
@given(st.text(alphabet="ab1-0[]{},.:*?@ \n#=slots%", max_size=30), st.booleans())
def test_any_text_gives_distinct_hosts_or_one_line(text: str, from_file: bool) -> None:
    said = ""
    found: list[Host] = []
    try:
        found = parse_hostfile(text, "hosts") if from_file else parse_hosts(text, aliases=ALIASES)
    except SchedulerError as error:
        said = str(error)
    assert bool(found) != bool(said)
    assert "\n" not in said
    assert len({(host.name, host.port) for host in found}) == len(found)
    assert not any(host.name.startswith("-") for host in found)
