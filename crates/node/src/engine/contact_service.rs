//! The contact node's service towards clients: it has the service addresses, and announces them.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use holdfast_sys::neighbour_announcement::announce;
use holdfast_sys::net::Interface;

use super::host_changes::{AddedAddress, HostChanges};
use super::network_setup::{
    add_to_interface, add_to_loopback, remove_address, remove_from_interface, service_addresses,
};
use crate::config::Config;
use crate::reach::reach_of;

/// Times of the announcements, after the addresses were taken: a frame may be lost, and a switch may need time.
const ANNOUNCE_AFTER: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(3),
];

/// Longest time that the operator's command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause between two looks at the operator's command.
const COMMAND_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Change of the contact node, for the operator's command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContactChange {
    Begin,
    End,
}

/// Service addresses at the contact node.
pub struct ContactService {
    interface: Interface,
    /// Record of the addresses that daemons have added to this host.
    host_changes: HostChanges,
    state_dir: PathBuf,
    /// True if every node receives all packets: no address moves then.
    is_everywhere: bool,
    addresses: Vec<IpAddr>,
    refused: RefusedAddresses,
    on_contact: Option<PathBuf>,
    /// True if this node has the addresses on its interface and announces them.
    is_serving: bool,
    /// Time at which the addresses were taken, and number of announcements since.
    announcing: Option<(Instant, usize)>,
}

impl ContactService {
    /// Returns the state of a node that serves from its start, or does not. `host_changes` has the addresses that this
    /// node may take by now.
    pub(super) fn new(
        config: &Config,
        interface: Interface,
        host_changes: HostChanges,
        is_serving: bool,
    ) -> Self {
        Self {
            interface,
            host_changes,
            state_dir: config.node.state_dir.clone(),
            is_everywhere: !reach_of(config.group.reach).has_contact_node(),
            addresses: service_addresses(config).into_iter().collect(),
            refused: RefusedAddresses::default(),
            on_contact: config.group.on_contact.clone(),
            is_serving,
            announcing: None,
        }
    }

    /// Takes the service addresses and announces them, unless this node has them already.
    pub fn begin(&mut self) {
        if std::mem::replace(&mut self.is_serving, true) {
            return;
        }
        tracing::info!("this node is the contact node and serves new clients");
        if !self.is_everywhere {
            for address in &self.addresses {
                let added = add_to_interface(&self.interface, *address);
                if let Err(error) = &added {
                    tracing::error!(%address, %error, "cannot take a service address");
                }
                self.refused.note(*address, &added);
            }
            self.announcing = Some((Instant::now(), 0));
            self.announce_if_due();
        }
        self.run_command(ContactChange::Begin);
    }

    /// Takes the address of a new service: on `lo` at every node, and on the interface of the contact node. An address that
    /// the kernel refuses is tried again by [`ContactService::retry_refused`].
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add_address(&mut self, address: IpAddr) -> io::Result<()> {
        if self.addresses.contains(&address) {
            return Ok(());
        }
        self.addresses.push(address);
        let taken = self.take_address(address);
        self.refused.note(address, &taken);
        taken
    }

    /// Takes the addresses that the kernel has refused.
    pub fn retry_refused(&mut self) {
        for address in self.refused.addresses() {
            let taken = self.take_address(address);
            if taken.is_ok() {
                tracing::info!(%address, "took a service address that the kernel had refused");
            }
            self.refused.note(address, &taken);
        }
    }

    /// Returns the problems for the operator.
    pub fn problems(&self) -> impl Iterator<Item = String> {
        self.refused.problems()
    }

    fn take_address(&mut self, address: IpAddr) -> io::Result<()> {
        // Recorded for both interfaces: a node that becomes contact node has no time for the disk.
        let recorded = self.host_changes.addresses.len();
        for interface in [&Interface::find("lo")?, &self.interface] {
            let absent = AddedAddress::absent_from(interface, [address])?;
            self.host_changes.addresses.extend(absent);
        }
        if self.host_changes.addresses.len() > recorded {
            self.store_host_changes();
        }
        add_to_loopback(address)?;
        if self.is_serving && !self.is_everywhere {
            add_to_interface(&self.interface, address)?;
            self.announcing = Some((Instant::now(), 0));
            self.announce_if_due();
        }
        Ok(())
    }

    /// Gives up the address of services that have ended.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_address(&mut self, address: IpAddr) -> io::Result<()> {
        self.addresses.retain(|known| *known != address);
        self.refused.forget(address);
        remove_address(&self.interface, address)?;
        let recorded = &mut self.host_changes.addresses;
        recorded.retain(|added| added.address != address);
        self.store_host_changes();
        Ok(())
    }

    fn store_host_changes(&self) {
        if let Err(error) = self.host_changes.store(&self.state_dir) {
            tracing::warn!(%error, "cannot record service addresses: they stay if their service is removed while no daemon runs");
        }
    }

    /// Gives up the service addresses.
    pub fn end(&mut self) {
        self.announcing = None;
        let was_serving = std::mem::replace(&mut self.is_serving, false);
        if !self.is_everywhere {
            for address in &self.addresses {
                if let Err(error) = remove_from_interface(&self.interface, *address) {
                    tracing::error!(%address, %error, "cannot give up a service address");
                }
            }
        }
        if was_serving {
            tracing::info!("this node serves no new clients: another node is the contact node");
            self.run_command(ContactChange::End);
        }
    }

    /// Returns the time of the next announcement.
    pub fn next_wake(&self) -> Option<Instant> {
        let (since, count) = self.announcing?;
        Some(since + *ANNOUNCE_AFTER.get(count)?)
    }

    /// Announces the service addresses on the link if an announcement is due.
    pub fn announce_if_due(&mut self) {
        if self.next_wake().is_none_or(|at| at > Instant::now()) {
            return;
        }
        for address in &self.addresses {
            if let Err(error) = announce(&self.interface, *address) {
                tracing::warn!(%address, %error, "cannot announce a service address");
            }
        }
        if let Some((_, count)) = &mut self.announcing {
            *count += 1;
        }
    }

    /// Runs the operator's command on a thread of its own.
    fn run_command(&self, change: ContactChange) {
        let Some(program) = self.on_contact.clone() else {
            return;
        };
        let word = match change {
            ContactChange::Begin => "begin",
            ContactChange::End => "end",
        };
        let mut arguments = vec![word.to_owned(), self.interface.name.clone()];
        arguments.extend(self.addresses.iter().map(ToString::to_string));
        let started = std::thread::Builder::new()
            .name("on-contact".to_owned())
            .spawn(move || match run_bounded(&program, &arguments) {
                Ok(()) => tracing::info!(program = %program.display(), word, "ran group.on_contact"),
                Err(error) => {
                    tracing::error!(program = %program.display(), word, %error, "group.on_contact failed")
                }
            });
        if let Err(error) = started {
            tracing::error!(%error, "cannot run group.on_contact");
        }
    }
}

/// Service addresses that the kernel has refused, each with the reason.
#[derive(Debug, Default)]
struct RefusedAddresses(BTreeMap<IpAddr, String>);

impl RefusedAddresses {
    /// Notes the result of an attempt to add an address.
    fn note(&mut self, address: IpAddr, added: &io::Result<()>) {
        match added {
            // The kernel has the address, and delivers its packets once the interface is up.
            Err(error) if error.kind() != io::ErrorKind::TimedOut => {
                self.0.insert(address, error.to_string());
            }
            _ => self.forget(address),
        }
    }

    fn forget(&mut self, address: IpAddr) {
        self.0.remove(&address);
    }

    fn addresses(&self) -> Vec<IpAddr> {
        self.0.keys().copied().collect()
    }

    fn problems(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(address, error)| {
            format!(
                "this host refuses service address {address} ({error}), and is asked again every second; \
                 allow addresses of its family at `lo` and at the node's interface"
            )
        })
    }
}

/// Runs a program, and kills it if it takes too long.
fn run_bounded(program: &Path, arguments: &[String]) -> io::Result<()> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .spawn()?;
    let start = Instant::now();
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(io::Error::other(status.to_string())),
            None if start.elapsed() > COMMAND_TIMEOUT => {
                child.kill()?;
                child.wait()?;
                return Err(io::ErrorKind::TimedOut.into());
            }
            None => std::thread::sleep(COMMAND_POLL_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_a_problem_while_the_kernel_refuses_it() {
        let mut refused = RefusedAddresses::default();
        let address: IpAddr = "fd00::9".parse().expect("an address");
        refused.note(address, &Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(refused.addresses(), [address]);
        let problem = refused.problems().next().expect("a problem");
        assert!(problem.contains("fd00::9 (permission denied)"), "{problem}");
        refused.note(address, &Err(io::ErrorKind::TimedOut.into()));
        assert_eq!(refused.problems().count(), 0);
    }

    #[test]
    fn failing_command_is_reported() {
        let shell = Path::new("/bin/sh");
        let run = |text: &str| run_bounded(shell, &["-c".to_owned(), text.to_owned()]);
        assert!(run("exit 0").is_ok());
        let error = run("exit 3").expect_err("fails");
        assert!(error.to_string().contains('3'), "{error}");
    }
}
