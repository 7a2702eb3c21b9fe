//! Choice of a packet's source address.
//!
//! The stack does not know routes: with several addresses it may choose the address of a network other than the
//! outgoing one, and the peer could not tell the paths apart. So the kernel's choice takes precedence over the stack's
//! if the endpoint has that address.

use holdfast_sys::address::{self, RawAddress};
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Time for which the kernel's choice is cached, because routes change.
const CHOICE_LIFETIME: Duration = Duration::from_secs(1);
/// Most cached destinations.
const ROUTES_MAX: usize = 65_536;

/// The local addresses of this process's endpoints, and the kernel's cached choices.
#[derive(Default)]
pub struct SourceAddresses {
    bound: HashSet<IpAddr>,
    is_any: bool,
    choices: HashMap<IpAddr, (Option<IpAddr>, Instant)>,
    now: Option<Instant>,
}

impl SourceAddresses {
    /// Adds an endpoint's address; an unspecified one stands for all.
    pub fn add_local(&mut self, address: IpAddr) {
        self.is_any |= address.is_unspecified();
        self.bound.insert(address);
    }

    /// Sets the time that the cache compares with.
    pub fn set_now(&mut self, now: Instant) {
        self.now = Some(now);
    }

    /// Returns the source address for a packet to `to`, for which the stack chose `chosen`.
    pub fn choose(&mut self, to: IpAddr, stack_choice: Option<IpAddr>) -> Option<IpAddr> {
        if self.bound.len() < 2 && !self.is_any {
            return stack_choice;
        }
        let now = *self.now.get_or_insert_with(Instant::now);
        let cached = self.choices.get(&to).copied();
        let choice = match cached {
            Some((choice, until)) if now < until => choice,
            _ => {
                if self.choices.len() >= ROUTES_MAX {
                    self.choices.clear();
                }
                let choice = kernel_choice(to);
                self.choices.insert(to, (choice, now + CHOICE_LIFETIME));
                choice
            }
        };
        let is_local = |choice: &IpAddr| self.is_any || self.bound.contains(choice);
        choice.filter(is_local).or(stack_choice)
    }
}

/// Returns the kernel's source address for `to`: connecting a UDP socket selects one, and sends nothing.
fn kernel_choice(to: IpAddr) -> Option<IpAddr> {
    let any = match to {
        IpAddr::V4(_) => "0.0.0.0:0",
        IpAddr::V6(_) => "[::]:0",
    };
    let socket = UdpSocket::bind(any).ok()?;
    let discard = RawAddress::for_family(SocketAddr::new(to, 9), false);
    address::connect(socket.as_fd(), &discard).ok()?;
    Some(address::local_address(socket.as_fd()).ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_choice_is_used_if_address_is_local() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let mut sources = SourceAddresses::default();
        sources.add_local(ip("192.0.2.1"));
        sources.add_local(ip("192.0.2.2"));
        let chosen = Some(ip("192.0.2.2"));
        // The kernel would choose 127.0.0.1, which no endpoint has here.
        assert_eq!(sources.choose(ip("127.0.0.1"), chosen), chosen);
        sources.add_local(ip("127.0.0.1"));
        assert_eq!(
            sources.choose(ip("127.0.0.1"), chosen),
            Some(ip("127.0.0.1"))
        );
    }
}
