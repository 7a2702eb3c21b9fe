//! Choice of a packet's source address.
//!
//! The stack does not know routes: with several addresses it may choose the address of a network other than the
//! outgoing one, and the peer could not tell the paths apart. So the kernel's choice takes precedence over the stack's
//! if the endpoint has that address.

use crate::address::{self, RawAddress};
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Time for which the kernel's choice is cached, because routes change.
const VALID: Duration = Duration::from_secs(1);
/// Most cached destinations.
const ROUTES_MAX: usize = 65_536;

/// The local addresses of this process's endpoints, and the kernel's cached choices.
#[derive(Default)]
pub struct Sources {
    bound: HashSet<IpAddr>,
    is_any: bool,
    choices: HashMap<IpAddr, (Option<IpAddr>, Instant)>,
    now: Option<Instant>,
}

impl Sources {
    /// Adds an endpoint's address; an unspecified one stands for all.
    pub fn bind(&mut self, address: IpAddr) {
        self.is_any |= address.is_unspecified();
        self.bound.insert(address);
    }

    /// Sets the time that the cache compares with.
    pub fn tell_time(&mut self, now: Instant) {
        self.now = Some(now);
    }

    /// Returns the source address for a packet to `to`, for which the stack chose `chosen`.
    pub fn best(&mut self, to: IpAddr, chosen: Option<IpAddr>) -> Option<IpAddr> {
        if self.bound.len() < 2 && !self.is_any {
            return chosen;
        }
        let now = *self.now.get_or_insert_with(Instant::now);
        let known = self.choices.get(&to).copied();
        let choice = match known {
            Some((choice, until)) if now < until => choice,
            _ => {
                if self.choices.len() >= ROUTES_MAX {
                    self.choices.clear();
                }
                let choice = choice_of_kernel(to);
                self.choices.insert(to, (choice, now + VALID));
                choice
            }
        };
        let is_ours = |choice: &IpAddr| self.is_any || self.bound.contains(choice);
        choice.filter(is_ours).or(chosen)
    }
}

/// Returns the kernel's source address for `to`: connecting a UDP socket selects one, and sends nothing.
fn choice_of_kernel(to: IpAddr) -> Option<IpAddr> {
    let any = match to {
        IpAddr::V4(_) => "0.0.0.0:0",
        IpAddr::V6(_) => "[::]:0",
    };
    let socket = UdpSocket::bind(any).ok()?;
    let discard = RawAddress::for_family(SocketAddr::new(to, 9), false);
    address::connect(socket.as_fd(), &discard).ok()?;
    Some(address::local(socket.as_fd()).ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_is_the_kernels_if_the_address_is_ours() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let mut sources = Sources::default();
        sources.bind(ip("192.0.2.1"));
        sources.bind(ip("192.0.2.2"));
        let chosen = Some(ip("192.0.2.2"));
        // The kernel would choose 127.0.0.1, which no endpoint has here.
        assert_eq!(sources.best(ip("127.0.0.1"), chosen), chosen);
        sources.bind(ip("127.0.0.1"));
        assert_eq!(sources.best(ip("127.0.0.1"), chosen), Some(ip("127.0.0.1")));
    }
}
