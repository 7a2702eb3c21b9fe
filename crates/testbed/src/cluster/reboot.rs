//! Reboots of nodes.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MembershipReport;

use super::Cluster;

/// Longest time for a rebooted node to be a member of its group again; the machine may be very busy.
const MEMBER_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between two checks.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

impl Cluster {
    /// Reboots a node's host as [`holdfast_lab::Lab::reboot`] does: what the host had in memory and in `/run` is gone, and
    /// the state directory of its daemon stays. At the end the daemon starts, as the service manager of a host starts it
    /// at boot, and nothing else.
    ///
    /// # Errors
    /// The cluster has example servers, which would not start again; or the lab cannot make the host anew.
    pub fn reboot_node(&mut self, node: &str) -> Result<()> {
        ensure!(
            self.spec.programs.is_empty(),
            "a node with example servers is not rebooted: they would stay away"
        );
        self.set_daemon_restart(node, false);
        let lab = self.lab.as_mut().context("the lab is down")?;
        let rebooted = lab.reboot(node);
        self.set_daemon_restart(node, true);
        rebooted.with_context(|| format!("reboot {node}"))
    }

    /// Waits until a rebooted node is a member of its group again, connected to all others, and has the group's
    /// services. In a group that runs itself, all nodes must have the same view.
    ///
    /// # Errors
    /// The wait takes minutes.
    pub fn wait_for_rebooted_node(&self, node: &str) -> Result<()> {
        let deadline = Instant::now() + MEMBER_TIMEOUT;
        let is_up = || {
            let control = self.blocking_control_client(node)?;
            anyhow::Ok(control.run(|client| client.status())?)
        };
        while let Err(error) = is_up() {
            if Instant::now() > deadline {
                return Err(error.context(format!("exceeded time: the daemon of {node} is down")));
            }
            sleep(POLL_INTERVAL);
        }
        self.wait_ready()?;
        if self.is_self_running() {
            self.wait_for_agreement(None, MEMBER_TIMEOUT)?;
        }
        Ok(())
    }

    /// Waits until all nodes of a group that runs itself, but for `absent`, have the same view, with one contact node that
    /// has a lease. Returns the contact node's report.
    ///
    /// # Errors
    /// The wait takes longer than `patience`; the text has the reports.
    pub fn wait_for_agreement(
        &self,
        absent: Option<&str>,
        patience: Duration,
    ) -> Result<MembershipReport> {
        let deadline = Instant::now() + patience;
        loop {
            let nodes = self.nodes().into_iter();
            let present = nodes.filter(|node| Some(node.as_str()) != absent);
            let reports = present.map(|node| Ok((self.membership(&node)?, node)));
            let reports = reports.collect::<Result<Vec<_>>>();
            if let Some(report) = reports.as_deref().ok().and_then(agreed_view) {
                return Ok(report);
            }
            ensure!(
                Instant::now() < deadline,
                "exceeded time: the nodes do not agree: {reports:#?}"
            );
            sleep(POLL_INTERVAL);
        }
    }
}

/// Returns the contact node's report if all reports have the same view and one contact node with a lease.
fn agreed_view(reports: &[(MembershipReport, String)]) -> Option<MembershipReport> {
    let serving = reports
        .iter()
        .filter(|(report, _)| report.lease_ms.is_some());
    let [(contact, name)] = serving.collect::<Vec<_>>()[..] else {
        return None;
    };
    let agrees = |(report, _): &(MembershipReport, String)| {
        report.epoch == contact.epoch && report.contact_node.as_deref() == Some(name.as_str())
    };
    reports.iter().all(agrees).then(|| contact.clone())
}
