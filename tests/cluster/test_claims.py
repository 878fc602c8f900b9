"""Who has a task that serves: chiefs that come, claim, serve and end, without a network."""

import dataclasses

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from keras_psplus.cluster import handshake, serving
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.serving import LeaseHolder, ServerLease
from tests.cluster import certificates
from tests.support.clock import Machine, few

LEADER = "l:1"
# Hosts and addresses of chiefs; the third has no TaskConfig, and serves where the leader does. The
# last one's network has an address that is another's in the first one's.
PLACES = (("a", "a:1"), ("b", "b:1"), ("l", None), ("l", LEADER), ("c", "a:1"))
SECONDS = st.sampled_from([1, 10, 29, 30, 31, 400])


@dataclasses.dataclass
class Chief:
    """A process that begins to listen in time after its claim, and listens until it ends."""

    number: int
    host: str
    address: str | None
    claimed: float | None = None
    listens: bool = False

    @property
    def serves_at(self):
        return self.address or LEADER

    @property
    def who(self):
        return f"chief-0 (process {self.number} on {self.host})"


class Claims(Machine):
    MODULES = (serving,)

    def __init__(self):
        super().__init__()
        self.patch.setattr(serving, "handshake", self)
        self.server, self.chiefs, self.count = LeaseHolder(LEADER), [], 0
        # Who has claimed it last, and may have ended.
        self.holder = None

    def listens(self, address):
        return any(chief.listens and chief.serves_at == address for chief in self.chiefs)

    def claim(self, chief):
        refusal = self.server.claim(chief.who, chief.host, f"{chief.number}", chief.address)
        holder, now = self.holder, self.clock.now
        is_again = chief is holder or (
            holder
            and chief.address
            and (chief.host, chief.address) == (holder.host, holder.address)
        )
        is_gone = holder is None or (
            not self.listens(holder.serves_at) and now >= holder.claimed + serving._START_SECONDS
        )
        if is_again or is_gone:
            assert refusal is None
            self.holder, chief.claimed = chief, now
        else:
            ago = now - holder.claimed
            assert refusal == f"{holder.who}, which has claimed it {ago:.0f} s ago"
            self.chiefs.remove(chief)

    @rule(place=st.sampled_from(PLACES), after=SECONDS, is_killed=st.booleans())
    def come(self, place, after, is_killed):
        if is_killed:
            self.chiefs.clear()
        self.wait(after)
        # Two processes cannot have a port.
        if any(place == (chief.host, chief.address) for chief in self.chiefs):
            return
        if place[0] == "l" and self.listens(LEADER):
            return
        self.count += 1
        self.chiefs.append(Chief(self.count, *place))
        self.claim(self.chiefs[-1])

    # As all others have been refused, there is one at most.
    @precondition(lambda self: self.chiefs)
    @rule(after=SECONDS)
    def claim_again(self, after):
        self.wait(after)
        self.claim(self.chiefs[0])

    def wait(self, seconds):
        if seconds >= 10:
            for chief in self.chiefs:
                chief.listens = True
        self.clock.sleep(seconds)

    @invariant()
    def one_chief_has_it(self):
        assert self.chiefs in ([], [self.holder])


TestClaims = Claims.TestCase
TestClaims.settings = few


@pytest.mark.parametrize("before", range(5))
def test_of_two_chiefs_at_once_one_gets_all_servers(monkeypatch, before):
    cluster = {"ps": ["s:0", "s:1"], "worker": ["s:2", "s:3"]}
    holders = {f"s:{i}": LeaseHolder("a:1") for i in range(4)}
    first, second = (
        ServerLease(cluster, TaskConfig({**cluster, "chief": (f"{host}:1",)}, "chief", 0))
        for host in "ab"
    )
    second._own |= {"process": "another", "who": "the second"}
    asked, refused = [], []

    def ask(address, what, own):
        if own is first._own and len(asked) == before:
            asked.append(address)
            claim_all(second)
        asked.append(address)
        return holders[address].claim(**own)

    def claim_all(lease):
        try:
            lease.claim_all()
        except ClusterStartupError:
            refused.append(lease)

    monkeypatch.setattr(serving, "ask", ask)
    claim_all(first)
    if first not in refused and before == 4:
        claim_all(second)
    assert refused == ([second] if before else [first])
    who = {holder._holder["who"] for holder in holders.values()}
    assert who == {(first if before else second)._own["who"]}


@pytest.mark.parametrize("mine, theirs", [("this", "other"), ("this", ""), ("", "other")])
def test_another_token_is_refused(monkeypatch, caplog, tmp_path, mine, theirs):
    monkeypatch.setenv(TOKEN_VARIABLE, mine)
    (port,) = free_ports(1)
    task = TaskConfig({"chief": ("127.0.0.1:1",), "ps": (f"127.0.0.1:{port}",)}, "ps", 0)
    listener = serving.ShutdownListener()
    channel = serving.listen_to_chief(
        task, {"claim": LeaseHolder("127.0.0.1:1").claim, "word": listener.receive}
    )
    try:
        with pytest.raises(ClusterStartupError, match="control channel.*Received: TF_CONFIG"):
            serving.listen_to_chief(task, {})
        lease = ServerLease(task.cluster)
        monkeypatch.setenv(TOKEN_VARIABLE, theirs)
        message = r"ps-0 \(127.*ps-0 belongs to another job: its token differs"
        with pytest.raises(ClusterStartupError, match=message):
            lease.claim_all()
        serving.ShutdownNotifier({"ps-0": task.address})
        assert not listener.has_chief_started
        monkeypatch.setenv(TOKEN_VARIABLE, mine)
        lease.claim_all()
        monkeypatch.setattr(lease, "_own", {**lease._own, "process": "z", "who": "another"})
        with pytest.raises(ClusterStartupError, match="serves another chief: chief .process"):
            lease.claim("ps-0")
        serving.ShutdownNotifier({"ps-0": task.address})
        assert listener.is_chief_lost and not listener.has_chief_left
        # A chief and its servers have to agree on TLS.
        for name, value in certificates.make(tmp_path, "task").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ClusterStartupError, match="does not speak TLS.*Received"):
            lease.claim("ps-0")
    finally:
        channel.close()
    lease.claim("ps-0")  # as TensorFlow's own server
    assert not caplog.records

    def dropped(*_):
        raise TimeoutError("no answer")

    monkeypatch.setattr(handshake, "connect", dropped)
    lease.claim("ps-0")
    assert "ps-0 cannot be reached on its control channel, 127" in caplog.text
