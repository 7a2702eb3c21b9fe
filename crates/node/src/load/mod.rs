//! The load of this node and of its processes: one measure for the conductor, for the pool policies and for operators.
//!
//! [`NodeLoadMeter`] reads counters of the host's control group (`control_groups`), of process trees (`process_trees`)
//! and of the network interface (`network`). [`LoadSampler`] runs the meter on a thread of its own, so that no packet
//! waits for `/proc`. [`LoadReports`] keeps the loads that programs report themselves.
//!
//! Unit of processor time: thousandths of a processor.

mod control_groups;
mod network;
mod process_trees;
mod reports;
mod sampler;
mod server_processes;

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_wire::conductor_frames::NodeDemand;

use control_groups::{GroupCounters, HostControlGroup, online_millis};
use network::NetworkCounters;
pub use process_trees::TreeLoad;
use process_trees::TreeMeter;
pub use reports::{
    LoadName, LoadReports, NewReport, ProcessInstance, Report, ReportRefusal, ReportSubject,
    Reporter, process_subject,
};
pub use sampler::{LoadSampler, MeasurementRequest, NewestMeasurement};

/// Utilization in thousandths from which on waiting counts as demand: processes on a less loaded node get what they
/// want, though they wait for each other now and then.
const WAITING_COUNTS_FROM: f64 = 900.0;

/// Load of the node over the time since the measurement before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeMeasurement {
    /// Processor time used by the whole host, in thousandths of a processor.
    pub cpu_millis: u32,
    /// Processors that the host has: the online ones, or fewer if its control group has a quota. In thousandths.
    pub capacity_millis: u32,
    /// Share of the time in which some process waited for a processor, in thousandths.
    pub waiting_millis: u32,
    /// Memory in use without files that the kernel can drop, in KiB; none if the kernel counts none for this host.
    pub memory_used_kib: Option<u64>,
    /// Memory that processes can still get, in KiB.
    pub memory_free_kib: u64,
    /// Bytes that the node's interface received in a second.
    pub received_bytes_s: u64,
    /// Bytes that the node's interface sent in a second.
    pub sent_bytes_s: u64,
    /// Loads of the trees, by the PIDs of their roots. A tree that has ended is absent.
    pub trees: BTreeMap<i32, TreeLoad>,
}

impl NodeMeasurement {
    /// Returns the demand of the whole node.
    pub fn demand(&self) -> NodeDemand {
        NodeDemand {
            used: self.demand_of(self.cpu_millis),
            capacity: self.capacity_millis,
        }
    }

    /// Returns the demand of a process that uses `cpu_millis`.
    ///
    /// The demand is the processor time used, and up to as much again if processes wait: in proportion to the time in
    /// which some process waits, and to the utilization above 90 %. The demands of all processes of a node add up to
    /// the node's.
    pub fn demand_of(&self, cpu_millis: u32) -> u32 {
        let utilization =
            f64::from(self.cpu_millis) / f64::from(self.capacity_millis.max(1)) * 1000.0;
        let saturation = (utilization - WAITING_COUNTS_FROM) / (1000.0 - WAITING_COUNTS_FROM);
        let waiting = f64::from(self.waiting_millis.min(1000)) / 1000.0;
        // A float-to-integer conversion saturates.
        (f64::from(cpu_millis) * (1.0 + saturation.clamp(0.0, 1.0) * waiting)).round() as u32
    }
}

/// Measures the load of this node and of process trees.
#[derive(Debug)]
pub struct NodeLoadMeter {
    group: HostControlGroup,
    /// Interface whose traffic counts.
    interface: String,
    trees: TreeMeter,
    /// All processes of this PID namespace, if the kernel counts no processor time for the host.
    all_processes: TreeMeter,
    last: Option<Counters>,
}

/// Counters of the host's control group and network interface, read at one time.
#[derive(Debug, Clone, Copy)]
struct Counters {
    at: Duration,
    group: GroupCounters,
    network: Option<NetworkCounters>,
}

impl NodeLoadMeter {
    /// Returns a meter for this host, whose traffic with clients and nodes passes `interface`.
    pub fn new(interface: &str) -> NodeLoadMeter {
        NodeLoadMeter {
            group: HostControlGroup::find(),
            interface: interface.to_owned(),
            trees: TreeMeter::default(),
            all_processes: TreeMeter::default(),
            last: None,
        }
    }

    /// Measures the node, and the trees of the processes `roots`. A bounded number of processes is read in one call: of
    /// many trees some keep their former load. `None` at the first call, since a load is a rate. `now` is any clock that does
    /// not go back.
    pub fn measure(&mut self, now: Duration, roots: &[i32]) -> Option<NodeMeasurement> {
        let trees = self.trees.measure(now, roots);
        let group = self.group.read();
        let own_namespace = match group.cpu_us {
            Some(_) => None,
            None => self.all_processes.measure(now, &[1]).remove(&1),
        };
        let counters = Counters {
            at: now,
            group,
            network: NetworkCounters::read(&self.interface),
        };
        let before = self.last.replace(counters)?;
        let elapsed = now.saturating_sub(before.at).as_secs_f64().max(1e-3);
        let rate = |now: Option<u64>, before: Option<u64>| {
            Some(now?.saturating_sub(before?) as f64 / elapsed)
        };
        // A float-to-integer conversion saturates. A microsecond in a second is a millionth of a processor.
        let millis = |rate_us: f64| (rate_us / 1000.0).round() as u32;
        let cpu_millis = match rate(group.cpu_us, before.group.cpu_us) {
            Some(rate) => millis(rate),
            None => own_namespace?.cpu_millis,
        };
        let waiting_millis = match rate(group.waiting_us, before.group.waiting_us) {
            Some(rate) => millis(rate),
            None => trees
                .values()
                .map(|tree| tree.waiting_millis)
                .max()
                .unwrap_or(0),
        };
        let online = online_millis();
        let traffic = |counter: fn(&NetworkCounters) -> u64| {
            let now = counters.network.as_ref().map(counter);
            rate(now, before.network.as_ref().map(counter)).unwrap_or(0.0) as u64
        };
        Some(NodeMeasurement {
            cpu_millis,
            capacity_millis: group.quota_millis.map_or(online, |quota| quota.min(online)),
            waiting_millis: waiting_millis.min(1000),
            memory_used_kib: group.memory_used_kib,
            memory_free_kib: group.memory_free_kib.unwrap_or(0),
            received_bytes_s: traffic(|counters| counters.received_bytes),
            sent_bytes_s: traffic(|counters| counters.sent_bytes),
            trees,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(cpu_millis: u32, waiting_millis: u32) -> NodeMeasurement {
        NodeMeasurement {
            cpu_millis,
            capacity_millis: 2000,
            waiting_millis,
            ..NodeMeasurement::default()
        }
    }

    #[test]
    fn waiting_counts_only_near_the_capacity() {
        for (cpu, waiting, demand) in [
            (0, 1000, 0),
            (1000, 800, 1000),
            (1800, 1000, 1800),
            (1900, 500, 2375),
            (2000, 0, 2000),
            (2000, 500, 3000),
            (2000, 1000, 4000),
            (3000, 1000, 6000),
        ] {
            let demand = NodeDemand {
                used: demand,
                capacity: 2000,
            };
            assert_eq!(
                measurement(cpu, waiting).demand(),
                demand,
                "{cpu} {waiting}"
            );
        }
        let mut no_capacity = measurement(5, 5);
        no_capacity.capacity_millis = 0;
        assert_eq!(no_capacity.demand().used, 5);
    }

    #[test]
    fn demands_of_processes_add_up() {
        let mut node = measurement(2000, 500);
        let tree = |cpu_millis| TreeLoad {
            cpu_millis,
            memory_kib: 7,
            ..TreeLoad::default()
        };
        node.trees = BTreeMap::from([(10, tree(1500)), (11, tree(500))]);
        let demands = node.trees.values();
        let demands: Vec<u32> = demands
            .map(|tree| node.demand_of(tree.cpu_millis))
            .collect();
        assert_eq!(demands, [2250, 750]);
        assert_eq!(node.demand().used, 3000);
    }

    #[test]
    fn first_measurement_has_no_load() {
        let own = i32::try_from(std::process::id()).expect("a PID");
        let mut meter = NodeLoadMeter::new("lo");
        assert_eq!(meter.measure(Duration::ZERO, &[own]), None);
        let measured = meter.measure(Duration::from_secs(1), &[own]);
        let measured = measured.expect("a load");
        assert!(measured.capacity_millis > 0, "{measured:?}");
        assert!(measured.memory_free_kib > 0, "{measured:?}");
        assert_eq!(measured.trees.len(), 1);
    }
}
