"""The channel contract suite over every endpoint of the package."""

from __future__ import annotations

import pytest
from channel_factories import AutoFactory, MemoryFactory, ShmFactory, TcpFactory

from dualpath.testing.channel_peer import ChannelFactory
from dualpath.testing.channel_suite import ChannelContractSuite


class TestTcp(ChannelContractSuite):
    @pytest.fixture
    def channel_factory(self) -> ChannelFactory:
        return TcpFactory()


class TestShm(ChannelContractSuite):
    @pytest.fixture
    def channel_factory(self) -> ChannelFactory:
        return ShmFactory()


class TestAuto(ChannelContractSuite):
    @pytest.fixture
    def channel_factory(self) -> ChannelFactory:
        return AutoFactory()


class TestMemory(ChannelContractSuite):
    @pytest.fixture
    def channel_factory(self) -> ChannelFactory:
        return MemoryFactory()
