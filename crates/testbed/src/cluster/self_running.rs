//! Clusters whose group runs itself: the group is created at one node, the others join by their seeds, and the services
//! are added through the control API.

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{
    MembershipReport, NewService, ServiceChange, ServiceChangeRequest, ServiceSettings,
};

use super::{Cluster, IpFamily, find_program};

impl Cluster {
    /// Returns true if the group runs itself.
    pub fn is_self_running(&self) -> bool {
        self.spec.self_running.is_some()
    }

    /// Returns the nodes that join a group that runs itself as backups, the first contact node included; none in another
    /// group.
    pub fn voters(&self) -> Vec<String> {
        let count = self.spec.self_running.map_or(0, |own| own.backups + 1);
        let mut nodes = self.nodes();
        nodes.truncate(count.into());
        nodes
    }

    /// Returns a node's view of a group that runs itself.
    ///
    /// # Errors
    /// The daemon does not answer, or the group does not run itself.
    pub fn membership(&self, node: &str) -> Result<MembershipReport> {
        let control = self.blocking_control_client(node)?;
        let status = control.run(async |client| client.status().await)?;
        status
            .membership
            .with_context(|| format!("{node} is in no group that runs itself"))
    }

    /// Changes the services of a group that runs itself. Returns the version of the group's settings with the change.
    ///
    /// # Errors
    /// The daemon does not answer, or refuses the change.
    pub fn change_services(&self, node: &str, change: ServiceChange) -> Result<u64> {
        let control = self.blocking_control_client(node)?;
        let request = ServiceChangeRequest { id: None, change };
        let changed = control.run(async |client| client.change_services(&request).await)?;
        Ok(changed.version)
    }

    /// Makes the node the contact node of a new group, before its daemon starts.
    pub(super) fn create_group(&self, node: &str) -> Result<()> {
        let mut command = self.lab().command(node)?;
        command.arg(find_program("holdfastd")?);
        command.arg("--create-group");
        command.arg("--config").arg(self.config_path(node));
        let output = command.output().context("create the group")?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "cannot create the group: {text}");
        Ok(())
    }

    /// Gives the group the services of the cluster.
    pub(super) fn add_services(&self) -> Result<()> {
        for service in &self.spec.services {
            let weights = service.weights.iter();
            let weights = weights.map(|(node, weight)| (node.clone(), Some(*weight)));
            let drain_ms = service.drain_ms.map(u32::try_from).transpose()?;
            let addresses = [IpFamily::V4, IpFamily::V6].map(|family| self.service_address(family));
            let added = ServiceChange::Add(NewService {
                name: service.pool.clone(),
                addresses: addresses.into(),
                port: service.port,
                protocol: service.protocol,
                settings: ServiceSettings {
                    weights: weights.collect(),
                    drain_ms,
                    ..ServiceSettings::default()
                },
            });
            self.change_services("n1", added)
                .with_context(|| format!("add service {}", service.pool))?;
        }
        Ok(())
    }
}
