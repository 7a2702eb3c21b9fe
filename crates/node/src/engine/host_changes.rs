//! Record of what the daemon has changed on its host and leaves there when it ends: service addresses and kernel settings.
//!
//! The record distinguishes the daemon's service addresses from addresses that the operator has configured, which the
//! daemon never removes. The record is a file in the state directory, and holds for one network namespace of one boot,
//! after which the addresses are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use holdfast_daemon::private_files::{private_options, run_directory};
use holdfast_sys::net::{self, Interface};
use holdfast_sys::sysctl;
use serde::{Deserialize, Serialize};

use super::network_setup::{prefix_length, service_addresses};
use crate::config::Config;

const FILE_NAME: &str = "host_changes.json";

/// Changes of the host that outlive the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HostChanges {
    /// Boot and network namespace of the changes.
    network: String,
    /// Addresses that a daemon added.
    pub(super) addresses: BTreeSet<AddedAddress>,
    /// Kernel settings that a daemon changed, by path, with their earlier values.
    pub(super) settings: BTreeMap<String, String>,
}

/// An address that a daemon added to an interface.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AddedAddress {
    /// Name of the interface.
    pub(super) interface: String,
    /// Index of the interface; another index is another interface of the same name.
    pub(super) index: u32,
    /// Address that the daemon added.
    pub(super) address: IpAddr,
}

impl AddedAddress {
    /// Returns those of the addresses that the interface lacks, for a daemon that is about to add them.
    ///
    /// # Errors
    /// The kernel does not list the interface's addresses.
    pub(super) fn absent_from(
        interface: &Interface,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> io::Result<Vec<Self>> {
        let present = net::addresses(interface.index)?;
        let addresses = addresses.into_iter();
        let absent =
            addresses.filter(|address| !present.contains(&(*address, prefix_length(*address))));
        let added = absent.map(|address| Self {
            interface: interface.name.clone(),
            index: interface.index,
            address,
        });
        Ok(added.collect())
    }

    /// Returns true if the interface still exists and has the address.
    fn is_present(&self) -> bool {
        let interface = Interface::find(&self.interface);
        interface.is_ok_and(|interface| interface.index == self.index)
            && net::addresses(self.index)
                .is_ok_and(|present| present.contains(&(self.address, prefix_length(self.address))))
    }

    /// Removes the address from the interface.
    pub(super) fn remove(&self) -> io::Result<()> {
        net::remove_address(self.index, self.address, prefix_length(self.address))
    }
}

impl HostChanges {
    /// Returns the changes that earlier daemons left on this host. Releases without a record left all service addresses,
    /// so these count if pinned links of a daemon exist and no record does. A damaged record counts as none.
    pub(super) fn of_host(config: &Config) -> Self {
        let recorded = read_record(&config.node.state_dir).unwrap_or_else(|error| {
            tracing::warn!(%error, "the record of added service addresses is damaged");
            None
        });
        let network = network_identity();
        let mut changes = match recorded {
            Some(recorded) if recorded.network == network => recorded,
            recorded => Self {
                addresses: match recorded.is_none() && has_pinned_link(&config.node.bpffs) {
                    true => present_service_addresses(config),
                    false => BTreeSet::new(),
                },
                network,
                settings: BTreeMap::new(),
            },
        };
        changes.addresses.retain(AddedAddress::is_present);
        changes
    }

    /// Writes the record, even an empty one: with it, no address of the host counts as that of an earlier release. A
    /// reader finds the earlier record or this one.
    ///
    /// # Errors
    /// The state directory cannot be written.
    pub(super) fn store(&self, state_dir: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        write_record(state_dir, &text)
    }

    /// Sets a kernel setting back to the value that it had before the daemon changed it.
    ///
    /// # Errors
    /// As [`sysctl::write`]; a setting whose interface is gone is no error.
    pub(super) fn restore_setting(&mut self, path: &str) -> io::Result<()> {
        let Some(before) = self.settings.remove(path) else {
            return Ok(());
        };
        match sysctl::write(path, &before) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            outcome => outcome,
        }
    }
}

/// Content of the record before a start, to be put back if the start fails.
pub(super) struct RecordBackup {
    state_dir: PathBuf,
    content: Option<Vec<u8>>,
    had_directory: bool,
}

impl RecordBackup {
    pub(super) fn take(state_dir: &Path) -> Self {
        Self {
            state_dir: state_dir.to_owned(),
            content: std::fs::read(state_dir.join(FILE_NAME)).ok(),
            had_directory: state_dir.is_dir(),
        }
    }

    pub(super) fn restore(&self) -> io::Result<()> {
        match &self.content {
            Some(content) => write_record(&self.state_dir, content),
            None => remove_record(&self.state_dir),
        }?;
        match self.had_directory || !self.state_dir.is_dir() {
            true => Ok(()),
            false => std::fs::remove_dir(&self.state_dir),
        }
    }
}

/// Reads the record, if there is one.
///
/// # Errors
/// The file cannot be read, or is damaged.
pub(super) fn read_record(state_dir: &Path) -> io::Result<Option<HostChanges>> {
    let path = state_dir.join(FILE_NAME);
    let error =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    match std::fs::read(&path) {
        Err(absent) if is_absent(&absent) => Ok(None),
        Err(other) => Err(error(other)),
        Ok(text) => match serde_json::from_slice(&text) {
            Ok(changes) => Ok(Some(changes)),
            Err(damage) => Err(error(damage.into())),
        },
    }
}

/// Returns true if the file or its directory does not exist.
fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

fn write_record(state_dir: &Path, text: &[u8]) -> io::Result<()> {
    run_directory(state_dir)?;
    let next = state_dir.join(format!("{FILE_NAME}.new"));
    let mut options = private_options();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .open(&next)?;
    file.write_all(text)?;
    file.sync_all()?;
    std::fs::rename(&next, state_dir.join(FILE_NAME))
}

/// Removes the record, if there is one.
///
/// # Errors
/// The state directory cannot be written.
pub(super) fn remove_record(state_dir: &Path) -> io::Result<()> {
    match std::fs::remove_file(state_dir.join(FILE_NAME)) {
        Err(error) if !is_absent(&error) => Err(error),
        _ => Ok(()),
    }
}

/// Returns the identity of this network namespace, as of this boot.
fn network_identity() -> String {
    let boot = sysctl::read("kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{boot} {}", namespace.display())
}

/// Returns true if a daemon has pinned a link of its programs.
pub(super) fn has_pinned_link(pins: &Path) -> bool {
    let files = std::fs::read_dir(pins).into_iter().flatten().flatten();
    files
        .map(|file| file.file_name())
        .any(|name| name.to_string_lossy().starts_with("link-"))
}

fn present_service_addresses(config: &Config) -> BTreeSet<AddedAddress> {
    let interfaces = [config.node.interface.as_str(), "lo"];
    let interfaces = interfaces.into_iter().flat_map(Interface::find);
    let of_interface = |interface: Interface| {
        let added = move |address| AddedAddress {
            interface: interface.name.clone(),
            index: interface.index,
            address,
        };
        service_addresses(config).into_iter().map(added)
    };
    interfaces
        .flat_map(of_interface)
        .filter(AddedAddress::is_present)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes() -> HostChanges {
        HostChanges {
            network: network_identity(),
            addresses: [AddedAddress {
                interface: "lo".into(),
                index: 1,
                address: "192.0.2.80".parse().unwrap(),
            }]
            .into(),
            settings: [("net/ipv4/conf/lo/arp_ignore".into(), "0".into())].into(),
        }
    }

    #[test]
    fn record_is_read_back_until_removed() {
        let folder = tempfile::tempdir().unwrap();
        let state_dir = folder.path().join("state");
        assert_eq!(read_record(&state_dir).unwrap(), None);
        changes().store(&state_dir).unwrap();
        assert_eq!(read_record(&state_dir).unwrap(), Some(changes()));
        remove_record(&state_dir).unwrap();
        assert_eq!(read_record(&state_dir).unwrap(), None);
        remove_record(&state_dir).unwrap();
        std::fs::write(state_dir.join(FILE_NAME), "{").unwrap();
        let error = read_record(&state_dir).unwrap_err().to_string();
        assert!(error.contains(FILE_NAME), "{error}");
    }

    #[test]
    fn failed_start_leaves_the_earlier_record() {
        let folder = tempfile::tempdir().unwrap();
        let state_dir = folder.path().join("state");
        let none = RecordBackup::take(&state_dir);
        changes().store(&state_dir).unwrap();
        let some = RecordBackup::take(&state_dir);
        let mut more = changes();
        more.settings.clear();
        more.store(&state_dir).unwrap();
        some.restore().unwrap();
        assert_eq!(read_record(&state_dir).unwrap(), Some(changes()));
        none.restore().unwrap();
        assert!(!state_dir.exists());
    }

    #[test]
    fn address_that_is_gone_does_not_count() {
        let gone = AddedAddress {
            interface: "no-such".into(),
            index: 4_000_000,
            address: "192.0.2.80".parse().unwrap(),
        };
        assert!(!gone.is_present());
    }
}
