//! Permanent neighbour entries for large groups: the kernel limits the learnt entries of all namespaces together, and a
//! group of 64 hosts needs more.

use std::fs;

use anyhow::{Context, Result, ensure};
use holdfast_lab::HostKind;

use super::Cluster;

/// Most nodes for which the kernel's default bound of 1,024 entries suffices.
const NODES_MAX: usize = 30;

impl Cluster {
    /// Gives each node of a large group the link addresses of the others. The kernel does not count such entries.
    pub(super) fn add_static_neighbours(&self) -> Result<()> {
        let hosts = self.lab().hosts().iter();
        let nodes: Vec<_> = hosts.filter(|host| host.kind == HostKind::Node).collect();
        if nodes.len() <= NODES_MAX {
            return Ok(());
        }
        for own in &nodes {
            let others = nodes.iter().filter(|other| other.name != own.name);
            let lines: String = others
                .flat_map(|other| {
                    let addresses = [other.v4.to_string(), other.v6.to_string()];
                    addresses.map(|address| {
                        let link = other.mac;
                        format!(
                            "neighbour replace {address} lladdr {link} nud permanent dev eth0\n"
                        )
                    })
                })
                .collect();
            let path = self.directory().join(format!("{}.neighbours", own.name));
            fs::write(&path, lines)?;
            let mut command = self.lab().command(&own.name)?;
            let output = command.args(["ip", "-batch"]).arg(path).output();
            let output = output.context("run ip")?;
            let text = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "cannot add neighbours: {text}");
        }
        Ok(())
    }
}
