//! The configuration of a node that joins a group: a file with only what is the node's own.

use std::fmt::Write;
use std::net::IpAddr;
use std::path::PathBuf;

use super::message::{GroupReach, JoinSettings};

/// Contents of the configuration.
#[derive(Debug, Clone)]
pub struct NodeFile {
    /// Name of the node.
    pub name: String,
    /// Address of the node's daemon.
    pub address: IpAddr,
    /// Network device on which clients' packets arrive.
    pub interface: String,
    /// Directory for files that survive a reboot; none for the default.
    pub state_dir: Option<PathBuf>,
    /// Directory of `ca.pem`, `ca.crl`, and the node's certificate and key.
    pub tls_dir: PathBuf,
    /// True if new hosts may ask this node for certificates.
    pub accepts_hosts: bool,
    /// Directory of the authority, if the node is to sign certificates of others. Used only with `accepts_hosts`.
    pub authority_dir: Option<PathBuf>,
    /// True if the node only serves, false if it may become contact node.
    pub only_serves: bool,
    /// True if `tls_dir` has `ca.crl`.
    pub has_revocation_list: bool,
    /// Settings of the group that the node's configuration repeats.
    pub group: JoinSettings,
}

impl NodeFile {
    /// Returns the text of the file.
    pub fn text(&self) -> String {
        let mut text = String::from(
            "# Made by `holdfast group create` or `holdfast node join`. docs/configuration.md describes every key.\n",
        );
        let quote = |text: &str| format!("{text:?}");
        let mut line = |key: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = match key.starts_with('[') {
                true => writeln!(text, "\n{key}"),
                false => writeln!(text, "{key} = {value}"),
            };
        };
        line("[node]", String::new());
        line("name", quote(&self.name));
        line("interface", quote(&self.interface));
        line("address", quote(&self.address.to_string()));
        if let Some(id) = self.configured_id() {
            line("id", id.to_string());
        }
        if let Some(dir) = &self.state_dir {
            line("state_dir", quote(&dir.to_string_lossy()));
        }
        line("[group]", String::new());
        line("name", quote(&self.group.name));
        line(
            "reach",
            quote(match self.group.reach {
                GroupReach::Steer => "steer",
                GroupReach::Broadcast { .. } => "broadcast",
            }),
        );
        if let GroupReach::Broadcast { shared_mac } = self.group.reach {
            let pairs = shared_mac.map(|byte| format!("{byte:02x}"));
            line("shared_mac", quote(&pairs.join(":")));
        }
        match &self.group.contact {
            Some(contact) => line("contact", quote(contact)),
            None => {
                let seeds: Vec<String> = (self.group.nodes.iter())
                    .map(|node| quote(&node.address.to_string()))
                    .collect();
                line("seeds", format!("[{}]", seeds.join(", ")));
                let role = if self.only_serves { "server" } else { "backup" };
                line("role", quote(role));
            }
        }
        line("[tls]", String::new());
        for (key, file) in [
            ("ca", "ca.pem".to_owned()),
            ("cert", format!("{}.pem", self.name)),
            ("key", format!("{}.key", self.name)),
            ("crl", "ca.crl".to_owned()),
        ] {
            if key == "crl" && !self.has_revocation_list {
                continue;
            }
            line(key, quote(&self.tls_dir.join(file).to_string_lossy()));
        }
        if self.accepts_hosts {
            line("[joining]", String::new());
            if let Some(dir) = &self.authority_dir {
                line("authority", quote(&dir.to_string_lossy()));
            }
        }
        let is_configured = self.group.contact.is_some();
        for node in self.group.nodes.iter().filter(|_| is_configured) {
            line("[[peer]]", String::new());
            line("name", quote(&node.name));
            line("id", node.id.to_string());
            line("address", quote(&node.address.ip().to_string()));
            line("port", node.address.port().to_string());
        }
        text
    }

    /// Returns the number of the node in a group that files configure: the smallest that no node has. A group that runs
    /// itself gives the number.
    pub fn configured_id(&self) -> Option<u16> {
        self.group.contact.as_ref()?;
        let is_free = |id: &u16| self.group.nodes.iter().all(|node| node.id != *id);
        (1..=u16::MAX).find(is_free)
    }
}
