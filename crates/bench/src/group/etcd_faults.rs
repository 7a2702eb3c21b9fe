//! Faults of etcd, in a group whose views are there.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MembershipReport;

use super::clients_during_fault::{ClientsDuringFault, FaultSample};
use super::fault_group::{FaultGroup, LOAD_PAUSE, SETTLE_TIME, contact_of};

/// Time without a majority of etcd: many times as long as the group takes to replace a silent contact node.
const WITHOUT_MAJORITY: Duration = Duration::from_secs(4);

/// A fault of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtcdFault {
    /// The leading member is killed, and starts again when another one leads.
    LeaderKilled,
    /// All members but one are killed, and start again after 4 s.
    MajorityLost,
}

impl FaultGroup {
    /// Puts the group under load, makes a fault of etcd happen, and heals etcd. The contact node gets no connections.
    ///
    /// # Errors
    /// A program fails, connections do not go on, a view changes, or a contact node without etcd has a lease.
    pub fn run_etcd_fault(&self, fault: EtcdFault, connections: usize) -> Result<FaultSample> {
        let sample = self.run_etcd_fault_under_load(fault, connections);
        sample.map_err(|error| self.cluster.with_logs(error))
    }

    fn run_etcd_fault_under_load(
        &self,
        fault: EtcdFault,
        connections: usize,
    ) -> Result<FaultSample> {
        let contact = contact_of(&self.wait_for_agreement(None)?)?;
        let mut owners: BTreeSet<String> = self.cluster.nodes().into_iter().collect();
        owners.remove(&contact);
        self.place_clients_at(&contact, &owners)?;
        let before = self.wait_for_agreement(None)?;
        let clients = ClientsDuringFault::start(
            &self.cluster,
            self.service,
            connections,
            (&contact, &owners),
        )?;
        std::thread::sleep(LOAD_PAUSE);
        let begin = Instant::now();
        match fault {
            EtcdFault::LeaderKilled => self.kill_leader()?,
            EtcdFault::MajorityLost => self.lose_majority(&contact, &before, &clients)?,
        }
        self.cluster.wait_for_etcd()?;
        let after = self.wait_for_agreement(None)?;
        clients.wait_for_progress()?;
        std::thread::sleep(SETTLE_TIME);
        let results = clients.stop(self.cluster.lab(), (begin, Instant::now()))?;
        Ok(FaultSample {
            accept_gap: results.accept_gap,
            client_gap: results.client_gap,
            resets: results.resets,
            bytes_wrong: results.bytes_wrong,
            views: after.epoch - before.epoch,
            contacts: [contact, contact_of(&after)?],
        })
    }

    fn kill_leader(&self) -> Result<()> {
        let leader = self.cluster.etcd_leader()?.context("etcd has a leader")?;
        self.cluster.set_etcd_restart(&leader, false);
        self.cluster.kill_etcd(&leader)?;
        self.wait_for("another member of etcd leads", || {
            let next = self.cluster.etcd_leader();
            next.is_ok_and(|next| next.is_some_and(|next| next != leader))
        })?;
        self.cluster.set_etcd_restart(&leader, true);
        Ok(())
    }

    fn lose_majority(
        &self,
        contact: &str,
        before: &MembershipReport,
        clients: &ClientsDuringFault,
    ) -> Result<()> {
        let members = self.cluster.etcd_hosts();
        let killed = members.get(1..).context("etcd has several members")?;
        for member in killed {
            self.cluster.set_etcd_restart(member, false);
            self.cluster.kill_etcd(member)?;
        }
        self.wait_for("the contact node has no lease", || {
            let report = self.cluster.membership(contact);
            report.is_ok_and(|report| {
                let answers = report.store.and_then(|store| store.answers);
                report.lease_ms.is_none() && answers == Some(false)
            })
        })?;
        clients.wait_for_progress()?;
        let end = Instant::now() + WITHOUT_MAJORITY;
        while Instant::now() < end {
            for node in self.cluster.nodes() {
                let report = self.cluster.membership(&node)?;
                let is_same = report.epoch == before.epoch && report.lease_ms.is_none();
                ensure!(is_same, "without etcd, {node} has {report:?}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        clients.wait_for_progress()?;
        for member in killed {
            self.cluster.set_etcd_restart(member, true);
        }
        Ok(())
    }
}
