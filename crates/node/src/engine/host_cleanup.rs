//! Removes from the host what an ended daemon left on purpose.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use holdfast_bpf::shared_with_c::PRIVATE_MARK;
use holdfast_sys::local_delivery_routes::{end_local_delivery, has_local_delivery};
use holdfast_sys::source_routes::{remove_routed_servers, routed_servers};
use serde::Serialize;

use super::host_changes::{HostChanges, remove_record};
use super::network_setup::{HOLD_DEVICE, ROUTING_TABLE};
use super::setup::{SetupError, system_error};
use crate::config::Config;
use crate::replication::REPLY_ROUTING_TABLE;

/// What was removed from the host, or would be.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct CleanupReport {
    /// True if nothing was removed.
    pub dry_run: bool,
    /// Service addresses.
    pub addresses: Vec<RemovedAddress>,
    /// Kernel settings that have their earlier value again.
    pub settings: Vec<String>,
    /// True for the routes and rules of migrated connections.
    pub routing_rules: bool,
    /// Servers of replicated services whose answers a rule routes to the contact node.
    pub replicated_servers: Vec<SocketAddr>,
    /// Pinned links, which attach the programs to the interface and the control group.
    pub links: Vec<String>,
    /// Pinned maps.
    pub maps: Vec<String>,
}

/// An address that was removed from an interface.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct RemovedAddress {
    /// Address that was removed.
    pub address: IpAddr,
    /// Name of the interface.
    pub interface: String,
}

impl fmt::Display for CleanupReport {
    /// Writes a line for each kind of removed thing.
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.dry_run {
            "would remove"
        } else {
            "removed"
        };
        let mut is_empty = true;
        let mut line = |content: String| {
            is_empty = false;
            writeln!(text, "{verb} {content}")
        };
        for RemovedAddress { address, interface } in &self.addresses {
            line(format!("service address {address} from {interface}"))?;
        }
        for setting in &self.settings {
            line(format!(
                "the daemon's value of {}",
                setting.replace('/', ".")
            ))?;
        }
        if self.routing_rules {
            line("the routes and rules of migrated connections".to_owned())?;
        }
        for server in &self.replicated_servers {
            line(format!(
                "the routing rule of the replicated server {server}"
            ))?;
        }
        for (kind, names) in [("program links", &self.links), ("pinned maps", &self.maps)] {
            if !names.is_empty() {
                line(format!("{} {kind}: {}", names.len(), names.join(", ")))?;
            }
        }
        if is_empty {
            writeln!(text, "there is nothing to remove")?;
        }
        Ok(())
    }
}

/// Removes from the host what an ended daemon left on purpose: service addresses, kernel settings, routing rules, filters
/// and maps. The node gives up all its flows. Addresses are removed before the filters, without which the stack would
/// reset connections of other nodes. Addresses that no daemon added stay. With `dry_run`, removes nothing.
///
/// # Errors
/// The kernel refuses a removal; what is absent already is no error.
pub fn clean_host(config: &Config, dry_run: bool) -> Result<CleanupReport, SetupError> {
    let state_dir = &config.node.state_dir;
    let mut changes = HostChanges::of_host(config);
    let (links, maps) = pinned_names(&config.node.bpffs)
        .map_err(system_error(format!("{}", config.node.bpffs.display())))?;
    let report = CleanupReport {
        dry_run,
        addresses: (changes.addresses.iter())
            .map(|added| RemovedAddress {
                address: added.address,
                interface: added.interface.clone(),
            })
            .collect(),
        settings: changes.settings.keys().cloned().collect(),
        routing_rules: has_local_delivery(ROUTING_TABLE).map_err(system_error("routing rules"))?,
        replicated_servers: (routed_servers(REPLY_ROUTING_TABLE))
            .map_err(system_error("routing rules"))?
            .into_iter()
            .collect(),
        links,
        maps,
    };
    if dry_run {
        return Ok(report);
    }
    while let Some(added) = changes.addresses.pop_first() {
        let (address, interface) = (added.address, &added.interface);
        let what = format!("removing service address {address} from {interface}");
        added.remove().map_err(system_error(what))?;
    }
    for path in &report.settings {
        (changes.restore_setting(path)).map_err(system_error(format!("restoring {path}")))?;
    }
    remove_record(state_dir).map_err(system_error("removing the record of service addresses"))?;
    end_local_delivery(PRIVATE_MARK, HOLD_DEVICE, ROUTING_TABLE)
        .map_err(system_error("removing routing rules"))?;
    remove_routed_servers(REPLY_ROUTING_TABLE)
        .map_err(system_error("removing routing rules of replicated servers"))?;
    // Removing the last reference to a link detaches its program.
    match std::fs::remove_dir_all(&config.node.bpffs) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let pins = config.node.bpffs.display();
            Err(system_error(format!("removing {pins}"))(error))
        }
        _ => Ok(report),
    }
}

/// Returns the names of the pinned links and of the other pins, sorted.
fn pinned_names(pins: &Path) -> io::Result<(Vec<String>, Vec<String>)> {
    let files = match std::fs::read_dir(pins) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Default::default()),
        files => files?,
    };
    let names = files.map(|file| Ok(file?.file_name().to_string_lossy().into_owned()));
    let mut names: Vec<String> = names.collect::<io::Result<_>>()?;
    names.sort();
    Ok(names
        .into_iter()
        .partition(|name| name.starts_with("link-")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_names_what_was_removed() {
        assert_eq!(
            CleanupReport::default().to_string(),
            "there is nothing to remove\n"
        );
        let report = CleanupReport {
            dry_run: true,
            addresses: vec![RemovedAddress {
                address: "192.0.2.80".parse().unwrap(),
                interface: "eth0".into(),
            }],
            settings: vec!["net/ipv4/conf/eth0/arp_ignore".into()],
            maps: vec!["config".into(), "flows".into()],
            ..CleanupReport::default()
        };
        assert_eq!(
            report.to_string(),
            "would remove service address 192.0.2.80 from eth0\n\
             would remove the daemon's value of net.ipv4.conf.eth0.arp_ignore\n\
             would remove 2 pinned maps: config, flows\n"
        );
    }

    #[test]
    fn pins_are_divided_into_links_and_maps() {
        let folder = tempfile::tempdir().unwrap();
        let pins = folder.path().join("pins");
        assert_eq!(pinned_names(&pins).unwrap(), Default::default());
        std::fs::create_dir(&pins).unwrap();
        for name in ["link-holdfast_sockets", "flows", "config"] {
            std::fs::write(pins.join(name), "").unwrap();
        }
        let (links, maps) = pinned_names(&pins).unwrap();
        assert_eq!(links, ["link-holdfast_sockets"]);
        assert_eq!(maps, ["config", "flows"]);
    }
}
