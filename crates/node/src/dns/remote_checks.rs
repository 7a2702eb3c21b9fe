//! Checks of addresses that are no service addresses of this group: the contact nodes of other groups. An address serves
//! if a TCP connection to it succeeds.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use holdfast_dns::{ConfiguredName, GroupService, TransportProtocol};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

/// Time between two checks of an address.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time until a failed check is repeated.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit of a check.
const CHECK_TIMEOUT: Duration = Duration::from_millis(500);
/// Number of consecutive failed checks after which an address does not serve.
const FALL: u32 = 2;

/// Judgement on one address that a DNS name has.
#[derive(Debug, Default)]
struct RemoteAddress {
    /// True while the checks find the address alive; false before the first check.
    is_alive: bool,
    failures: u32,
    /// True for a service address of this group, which the engine judges.
    is_of_group: bool,
}

impl RemoteAddress {
    /// Takes the result of a check. Returns true if the judgement changes.
    fn on_check(&mut self, has_connected: bool) -> bool {
        let was_alive = self.is_alive;
        self.failures = match has_connected {
            true => 0,
            false => self.failures.saturating_add(1),
        };
        self.is_alive = has_connected || (was_alive && self.failures < FALL);
        self.is_alive != was_alive
    }
}

/// The checks of all configured addresses of TCP services.
pub(super) struct RemoteChecks {
    addresses: Rc<RefCell<BTreeMap<SocketAddr, RemoteAddress>>>,
    changed: Rc<Notify>,
}

impl RemoteChecks {
    /// Starts a task for each address.
    pub(super) fn start(names: &[ConfiguredName]) -> RemoteChecks {
        let checked = names
            .iter()
            .filter(|name| name.protocol == TransportProtocol::Tcp);
        let checked = checked.flat_map(|name| {
            name.addresses
                .iter()
                .map(|address| name.socket_address(address))
        });
        let addresses: BTreeMap<SocketAddr, RemoteAddress> = checked
            .map(|address| (address, RemoteAddress::default()))
            .collect();
        let tasks: Vec<SocketAddr> = addresses.keys().copied().collect();
        let checks = RemoteChecks {
            addresses: Rc::new(RefCell::new(addresses)),
            changed: Rc::new(Notify::new()),
        };
        for address in tasks {
            spawn_local(check(
                address,
                checks.addresses.clone(),
                checks.changed.clone(),
            ));
        }
        checks
    }

    /// Leaves the addresses of the group to the engine.
    pub(super) fn leave_out(&self, services: &[GroupService]) {
        for (address, state) in self.addresses.borrow_mut().iter_mut() {
            let is_here = |service: &GroupService| {
                service.protocol == TransportProtocol::Tcp && service.address == *address
            };
            state.is_of_group = services.iter().any(is_here);
        }
    }

    /// Returns true if the address serves. A UDP service cannot be checked and counts as serving.
    pub(super) fn is_alive(&self, protocol: TransportProtocol, address: SocketAddr) -> bool {
        let addresses = self.addresses.borrow();
        protocol == TransportProtocol::Udp
            || addresses.get(&address).is_some_and(|state| state.is_alive)
    }

    /// Waits for a change.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }
}

async fn check(
    address: SocketAddr,
    addresses: Rc<RefCell<BTreeMap<SocketAddr, RemoteAddress>>>,
    changed: Rc<Notify>,
) {
    loop {
        let is_of_group = addresses
            .borrow()
            .get(&address)
            .is_none_or(|state| state.is_of_group);
        let mut pause = CHECK_INTERVAL;
        if !is_of_group {
            let connected = timeout(CHECK_TIMEOUT, TcpStream::connect(address)).await;
            let has_connected = matches!(connected, Ok(Ok(_)));
            if let Some(state) = addresses.borrow_mut().get_mut(&address) {
                if state.on_check(has_connected) {
                    changed.notify_one();
                }
                if state.is_alive && state.failures > 0 {
                    pause = RETRY_INTERVAL;
                }
            }
        }
        sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failed_check_changes_nothing() {
        let mut address = RemoteAddress::default();
        assert!(!address.on_check(false));
        assert!(address.on_check(true) && address.is_alive);
        assert!(!address.on_check(false) && address.is_alive);
        assert!(!address.on_check(true));
        assert!(!address.on_check(false));
        assert!(address.on_check(false) && !address.is_alive);
        assert!(address.on_check(true) && address.is_alive);
    }
}
