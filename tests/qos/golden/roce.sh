# Traffic classes of dualpath: RoCE v2, NVIDIA NICs and Cumulus switches
# Apply: as root on each host (sh); the part of the switch on each switch between them
# Tested: only as text. NOT on RoCE hardware, which no test of ours had; compare with your vendor's guide.
#
# class      urgency  DSCP  priority  SO_PRIORITY  SL  VL  lossless
# control    high       24         3            6   0   0  yes
# execution  high       46         5            6   1   1  yes
# kv         low         8         1            2   2   2  yes
# dispatch   high       34         4            6   3   3  yes
# storage    low        10         1            2   4   2  yes

# The NIC looks at the DSCP, also of packets without a VLAN tag.
# dcbx os: what a switch announces does not overwrite this.
mlnx_qos -i ens1f0np0 --dcbx=os --trust=dscp

# DSCP to priority, and congestion notifications (CNP) to theirs.
# DSCP 24: control
# DSCP 46: execution
# DSCP 8: kv
# DSCP 34: dispatch
# DSCP 10: storage
mlnx_qos -i ens1f0np0 --dscp2prio=set,24,3
mlnx_qos -i ens1f0np0 --dscp2prio=set,46,5
mlnx_qos -i ens1f0np0 --dscp2prio=set,8,1
mlnx_qos -i ens1f0np0 --dscp2prio=set,34,4
mlnx_qos -i ens1f0np0 --dscp2prio=set,10,1
mlnx_qos -i ens1f0np0 --dscp2prio=set,48,6

# Priority to queue (-p), how a queue is scheduled (-s), and its weight in percent (-t).
# The low classes have 1, and so has unmarked traffic (queue 0); high classes share the rest.
mlnx_qos -i ens1f0np0 -p 0,1,0,3,4,5,6,0 -s ets,ets,ets,ets,ets,ets,strict,ets -t 1,1,0,32,33,33,0,0

# PFC: a full buffer pauses the sender of that priority instead of dropping.
# Only where all hops agree; a switch commonly has buffers for few lossless priorities.
mlnx_qos -i ens1f0np0 -f 0,1,0,1,1,1,0,0

# ECN slows senders before PFC must pause them (DCQCN: notification point and reaction point).
echo 1 > /sys/class/net/ens1f0np0/ecn/roce_np/enable/1
echo 1 > /sys/class/net/ens1f0np0/ecn/roce_rp/enable/1
echo 1 > /sys/class/net/ens1f0np0/ecn/roce_np/enable/3
echo 1 > /sys/class/net/ens1f0np0/ecn/roce_rp/enable/3
echo 1 > /sys/class/net/ens1f0np0/ecn/roce_np/enable/4
echo 1 > /sys/class/net/ens1f0np0/ecn/roce_rp/enable/4
echo 1 > /sys/class/net/ens1f0np0/ecn/roce_np/enable/5
echo 1 > /sys/class/net/ens1f0np0/ecn/roce_rp/enable/5
echo 48 > /sys/class/net/ens1f0np0/ecn/roce_np/cnp_dscp
echo 6 > /sys/class/net/ens1f0np0/ecn/roce_np/cnp_802p_prio

# Traffic class byte (DSCP * 4 + 2) of connections made by RDMA CM that set none: control.
# Leave /sys/class/infiniband/mlx5_0/tc/1/traffic_class alone: it would put ALL into one class.
cma_roce_tos -d mlx5_0 -t 98

# The same on a switch, in NVUE of Cumulus Linux; other vendors have it by other names. (each switch)
# Size buffers and thresholds for your ports and cables: the byte figures are a common start.
#   nv set qos mapping default-global trust l3
#   nv set qos mapping default-global dscp 24 switch-priority 3
#   nv set qos mapping default-global dscp 46 switch-priority 5
#   nv set qos mapping default-global dscp 8 switch-priority 1
#   nv set qos mapping default-global dscp 34 switch-priority 4
#   nv set qos mapping default-global dscp 10 switch-priority 1
#   nv set qos mapping default-global dscp 48 switch-priority 6
#   nv set qos egress-queue-mapping default-global switch-priority 0 traffic-class 0
#   nv set qos egress-queue-mapping default-global switch-priority 1 traffic-class 1
#   nv set qos egress-queue-mapping default-global switch-priority 2 traffic-class 0
#   nv set qos egress-queue-mapping default-global switch-priority 3 traffic-class 3
#   nv set qos egress-queue-mapping default-global switch-priority 4 traffic-class 4
#   nv set qos egress-queue-mapping default-global switch-priority 5 traffic-class 5
#   nv set qos egress-queue-mapping default-global switch-priority 6 traffic-class 6
#   nv set qos egress-queue-mapping default-global switch-priority 7 traffic-class 0
#   nv set qos pfc default-global switch-priority 1,3,4,5
#   nv set qos pfc default-global tx enable
#   nv set qos pfc default-global rx enable
#   nv set qos congestion-control default-global traffic-class 1,3,4,5 min-threshold 150000
#   nv set qos congestion-control default-global traffic-class 1,3,4,5 max-threshold 1500000
#   nv set qos congestion-control default-global traffic-class 1,3,4,5 ecn enable
#   nv set qos egress-scheduler default-global traffic-class 0 mode dwrr
#   nv set qos egress-scheduler default-global traffic-class 0 bw-percent 1
#   nv set qos egress-scheduler default-global traffic-class 1 mode dwrr
#   nv set qos egress-scheduler default-global traffic-class 1 bw-percent 1
#   nv set qos egress-scheduler default-global traffic-class 3 mode dwrr
#   nv set qos egress-scheduler default-global traffic-class 3 bw-percent 32
#   nv set qos egress-scheduler default-global traffic-class 4 mode dwrr
#   nv set qos egress-scheduler default-global traffic-class 4 bw-percent 33
#   nv set qos egress-scheduler default-global traffic-class 5 mode dwrr
#   nv set qos egress-scheduler default-global traffic-class 5 bw-percent 33
#   nv set qos egress-scheduler default-global traffic-class 6 mode strict
#   nv config apply

# Environment of the processes that send
#   execution:  (NCCL, RCCL; the second for its own control messages)
#     NCCL_IB_TC=186
#     NCCL_IB_FIFO_TC=98
#   dispatch:  (NVSHMEM: DeepEP and its like)
#     NVSHMEM_IB_TRAFFIC_CLASS=138
#   kv:  (all of UCX in the process; NIXL: engine_config IB_TRAFFIC_CLASS=34 for one agent's UCX backend)
#     UCX_IB_TRAFFIC_CLASS=34
#   storage:  (clients of a store over UCX, in a process of their own)
#     UCX_IB_TRAFFIC_CLASS=42
