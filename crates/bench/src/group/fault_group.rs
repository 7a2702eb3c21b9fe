//! A group that runs itself, and faults of its contact node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{
    MembershipReport, ServiceChange, ServiceSettings, ServiceStatus, ServiceUpdate,
};
use holdfast_testbed::cluster::{
    Cluster, ClusterSpec, ExampleServer, IpFamily, SelfRunningGroupSpec,
};
use nix::sys::signal::Signal;

use super::clients_during_fault::{ClientsDuringFault, FaultSample};

const NODES: u16 = 5;
const BACKUPS: u16 = 3;
const PORT: u16 = 7;
const ETCD_MEMBERS: u16 = 3;
/// Pause before the restart of a daemon: none, since the programs by which the lab starts a daemon take as long (50 to 80 ms)
/// as the pause in `packaging/systemd/holdfastd.service` and the start by systemd.
const RESTART_DELAY: Duration = Duration::ZERO;
/// Time under load before a fault.
pub(super) const LOAD_PAUSE: Duration = Duration::from_millis(500);
/// Time under load after the group has answered a fault: two retransmissions of a SYN fit.
pub(super) const SETTLE_TIME: Duration = Duration::from_millis(1_500);
/// Duration of a daemon's pause.
const PAUSE: Duration = Duration::from_millis(100);
/// Time between two pauses.
const PAUSE_INTERVAL: Duration = Duration::from_millis(400);
/// Longest wait for the group.
const PATIENCE: Duration = Duration::from_secs(30);

/// A fault of the contact node, or of any daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Fault {
    /// The host of the contact node is cut off, and joins again later
    ContactHostLost,
    /// The daemon of the contact node is killed; the supervisor starts another
    ContactDaemonRestarted,
    /// The daemon of the contact node is killed and stays away; its kernel runs on
    ContactDaemonKilled,
    /// An operator makes a backup the contact node
    Promotion,
    /// Each daemon in turn is stopped for 100 ms
    DaemonsPaused,
}

impl Fault {
    /// All faults of the contact node.
    pub const ALL: [Fault; 5] = [
        Fault::ContactHostLost,
        Fault::ContactDaemonRestarted,
        Fault::ContactDaemonKilled,
        Fault::Promotion,
        Fault::DaemonsPaused,
    ];

    /// Returns the fault's name in rows and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fault::ContactHostLost => "contact_host_lost",
            Fault::ContactDaemonRestarted => "contact_daemon_restarted",
            Fault::ContactDaemonKilled => "contact_daemon_killed",
            Fault::Promotion => "promotion",
            Fault::DaemonsPaused => "daemons_paused",
        }
    }

    /// Returns true if the contact node changes.
    #[must_use]
    pub fn changes_contact(self) -> bool {
        match self {
            Fault::ContactHostLost | Fault::ContactDaemonKilled | Fault::Promotion => true,
            Fault::ContactDaemonRestarted | Fault::DaemonsPaused => false,
        }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Five nodes with echo servers, of which four may become contact node, and two client hosts.
pub struct FaultGroup {
    pub(super) cluster: Cluster,
    pub(super) service: SocketAddr,
}

impl FaultGroup {
    /// Brings a group of five nodes up.
    ///
    /// # Errors
    /// The lab or a program fails.
    pub fn up(name: &str) -> Result<FaultGroup> {
        FaultGroup::with_nodes(name, NODES)
    }

    /// Brings a group of this many nodes up, with as many backups as any other.
    ///
    /// # Errors
    /// The lab or a program fails.
    pub fn with_nodes(name: &str, nodes: u16) -> Result<FaultGroup> {
        FaultGroup::with_spec(name, |spec| spec.nodes = nodes)
    }

    /// Brings a group of five nodes up whose views are in etcd, which has three members at further client hosts.
    ///
    /// # Errors
    /// The lab or a program fails.
    pub fn with_etcd(name: &str) -> Result<FaultGroup> {
        FaultGroup::with_spec(name, |spec| {
            spec.nodes = NODES;
            spec.clients += ETCD_MEMBERS;
            spec.etcd_members = ETCD_MEMBERS;
        })
    }

    fn with_spec(name: &str, change: impl FnOnce(&mut ClusterSpec)) -> Result<FaultGroup> {
        let mut spec = ClusterSpec::new(format!("{name}-{}", std::process::id()));
        spec.clients = 2;
        spec.restart_delay = RESTART_DELAY;
        spec.self_running = Some(SelfRunningGroupSpec { backups: BACKUPS });
        spec.program_log = "warn".into();
        change(&mut spec);
        let cluster = Cluster::up(spec.program(ExampleServer::Echo { port: PORT }))?;
        let service = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
        Ok(FaultGroup { cluster, service })
    }

    /// Returns the cluster of the group.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Puts the group under load, makes a fault happen, and heals the group. The contact node gets no connections.
    ///
    /// # Errors
    /// A program fails, connections do not go on, the group does not recover, or two nodes are contact node.
    pub fn run_fault(&self, fault: Fault, connections: usize) -> Result<FaultSample> {
        let sample = self.run_fault_under_load(fault, connections);
        sample.map_err(|error| self.cluster.with_logs(error))
    }

    fn run_fault_under_load(&self, fault: Fault, connections: usize) -> Result<FaultSample> {
        let contact = contact_of(&self.wait_for_agreement(None)?)?;
        let mut owners: BTreeSet<String> = self.cluster.nodes().into_iter().collect();
        owners.remove(&contact);
        self.place_clients_at(&contact, &owners)?;
        // Each change of the group's settings is a view of its own.
        let before = self.wait_for_agreement(None)?;
        let clients = ClientsDuringFault::start(
            &self.cluster,
            self.service,
            connections,
            (&contact, &owners),
        )?;
        std::thread::sleep(LOAD_PAUSE);
        let begin = Instant::now();
        let absent = self.begin_fault(fault, &before)?;
        let after = self.wait_for_agreement(absent)?;
        if fault.changes_contact() {
            ensure!(
                contact_of(&after)? != contact,
                "{contact} is still contact node"
            );
        }
        clients.wait_for_progress()?;
        std::thread::sleep(SETTLE_TIME);
        let end = Instant::now();
        if fault == Fault::ContactHostLost {
            let cut = self.cluster.membership(&contact)?;
            ensure!(cut.lease_ms.is_none(), "{contact} still has a lease");
        }
        let results = clients.stop(self.cluster.lab(), (begin, end))?;
        let after = self.wait_for_agreement(absent)?;
        self.end_fault(fault, &contact)?;
        Ok(FaultSample {
            accept_gap: results.accept_gap,
            client_gap: results.client_gap,
            resets: results.resets,
            bytes_wrong: results.bytes_wrong,
            views: after.epoch - before.epoch,
            contacts: [contact, contact_of(&after)?],
        })
    }

    /// Makes a fault happen. Returns the node that is out of the group now.
    fn begin_fault<'a>(
        &self,
        fault: Fault,
        before: &'a MembershipReport,
    ) -> Result<Option<&'a str>> {
        let contact = before.contact_node.as_deref().context("a contact node")?;
        match fault {
            Fault::ContactHostLost => {
                self.cluster.lab().cut(contact)?;
                self.wait_for_epoch_after(before, contact)?;
                Ok(Some(contact))
            }
            Fault::ContactDaemonRestarted => {
                let starts = self.cluster.daemon_starts(contact);
                self.cluster.kill_daemon(contact)?;
                self.wait_for("the supervisor starts a daemon", || {
                    self.cluster.daemon_starts(contact) > starts
                })?;
                self.cluster.wait_ready()?;
                Ok(None)
            }
            Fault::ContactDaemonKilled => {
                self.cluster.set_daemon_restart(contact, false);
                self.cluster.kill_daemon(contact)?;
                self.wait_for_epoch_after(before, contact)?;
                Ok(Some(contact))
            }
            Fault::Promotion => {
                let next = before.backups.first().context("the group has a backup")?;
                let control = self.cluster.blocking_control_client(contact)?;
                control.run(async |client| client.promote_node(next).await)?;
                Ok(None)
            }
            Fault::DaemonsPaused => {
                for node in self.cluster.nodes() {
                    self.cluster.signal_daemon(&node, Signal::SIGSTOP)?;
                    std::thread::sleep(PAUSE);
                    self.cluster.signal_daemon(&node, Signal::SIGCONT)?;
                    std::thread::sleep(PAUSE_INTERVAL);
                }
                Ok(None)
            }
        }
    }

    /// Heals the group, and waits until all nodes are in the view.
    fn end_fault(&self, fault: Fault, contact: &str) -> Result<()> {
        match fault {
            Fault::ContactHostLost => self.cluster.lab().heal(contact)?,
            Fault::ContactDaemonKilled => self.cluster.set_daemon_restart(contact, true),
            Fault::ContactDaemonRestarted | Fault::Promotion | Fault::DaemonsPaused => {}
        }
        self.cluster.wait_ready()?;
        self.wait_for_agreement(None)?;
        Ok(())
    }

    /// Gives all new clients to these nodes.
    pub(super) fn place_clients_at(&self, contact: &str, owners: &BTreeSet<String>) -> Result<()> {
        let weight = |node: String| {
            let weight = u32::from(owners.contains(&node));
            (node, Some(weight))
        };
        let weights: BTreeMap<_, _> = self.cluster.nodes().into_iter().map(weight).collect();
        let update = ServiceUpdate {
            name: "echo".to_owned(),
            settings: ServiceSettings {
                weights,
                ..ServiceSettings::default()
            },
            ..ServiceUpdate::default()
        };
        self.cluster
            .change_services(contact, ServiceChange::Set(update))?;
        let control = self.cluster.blocking_control_client(contact)?;
        let is_placed = |service: &ServiceStatus| {
            let nodes = service.nodes.iter();
            let placed = nodes.filter(|node| node.placed_weight > 0);
            let placed: BTreeSet<String> = placed.map(|node| node.node.clone()).collect();
            placed == *owners
        };
        self.wait_for("new clients go to all nodes but the contact node", || {
            let status = control.run(async |client| client.status().await);
            status.is_ok_and(|status| {
                !status.services.is_empty() && status.services.iter().all(is_placed)
            })
        })
    }

    /// Waits until a node other than `absent` knows a newer view.
    pub(super) fn wait_for_epoch_after(
        &self,
        before: &MembershipReport,
        absent: &str,
    ) -> Result<()> {
        let nodes = self.cluster.nodes();
        self.wait_for("a new view", || {
            let mut others = nodes.iter().filter(|node| *node != absent);
            others.any(|node| {
                let report = self.cluster.membership(node);
                report.is_ok_and(|report| report.epoch > before.epoch)
            })
        })
    }

    /// Waits until all nodes but `absent` have the same view, with one contact node that has a lease. Returns the
    /// contact node's report.
    pub(super) fn wait_for_agreement(&self, absent: Option<&str>) -> Result<MembershipReport> {
        self.cluster.wait_for_agreement(absent, PATIENCE)
    }

    pub(super) fn wait_for(&self, what: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !condition() {
            ensure!(Instant::now() < deadline, "exceeded time: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

pub(super) fn contact_of(report: &MembershipReport) -> Result<String> {
    let contact = report.contact_node.clone();
    contact.context("the view has a contact node")
}
