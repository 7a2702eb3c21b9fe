//! The search for the processes that serve: those with a listening socket at the address of a service.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::net::SocketAddr;

use holdfast_sys::netlink::Netlink;
use holdfast_sys::sock_diag::{self, tcp_listeners};

/// Number of processes whose descriptors are read in one call, besides those of known servers.
const PROCESSES_PER_CALL: usize = 64;
/// Number of descriptors of one process that are read. Listeners are older than connections, and so come first.
const DESCRIPTORS_MAX: usize = 256;
/// Maximum number of servers.
const SERVERS_MAX: usize = 256;

/// Services of a process.
type Services = BTreeSet<SocketAddr>;

/// The search, which reads a bounded number of processes in one call.
#[derive(Debug)]
pub(super) struct ServerProcesses {
    netlink: Netlink,
    /// The processes with a listening socket of a service.
    listening: BTreeMap<i32, Services>,
    /// Last PID that was read.
    last_read: i32,
}

impl ServerProcesses {
    /// # Errors
    /// There is no descriptor for a netlink socket.
    pub fn new() -> io::Result<ServerProcesses> {
        Ok(ServerProcesses {
            netlink: sock_diag::open()?,
            listening: BTreeMap::new(),
            last_read: 0,
        })
    }

    /// Returns the servers of TCP services known so far. Of processes that inherited a socket from each other, only the
    /// topmost one counts.
    pub fn find(&mut self, services: &[SocketAddr]) -> BTreeMap<i32, Services> {
        let sockets = match services {
            [] => HashMap::new(),
            _ => self.listening_sockets(services),
        };
        if sockets.is_empty() {
            self.listening.clear();
            return BTreeMap::new();
        }
        let mut pids: BTreeSet<i32> = self.listening.keys().copied().collect();
        pids.extend(self.next_processes());
        for pid in pids {
            let found = services_of(pid, &sockets);
            if found.is_empty() {
                self.listening.remove(&pid);
            } else if self.listening.len() < SERVERS_MAX || self.listening.contains_key(&pid) {
                self.listening.insert(pid, found);
            }
        }
        let is_topmost =
            |pid: &i32| parent_of(*pid).is_none_or(|parent| !self.listening.contains_key(&parent));
        let topmost = self.listening.iter().filter(|(pid, _)| is_topmost(pid));
        topmost.map(|(pid, found)| (*pid, found.clone())).collect()
    }

    /// Returns the inodes of sockets that listen for clients of the services.
    fn listening_sockets(&mut self, services: &[SocketAddr]) -> HashMap<u64, Services> {
        let mut found: HashMap<u64, Services> = HashMap::new();
        for socket in tcp_listeners(&mut self.netlink).unwrap_or_default() {
            let received = services.iter().filter(|service| socket.receives(**service));
            let received: Services = received.copied().collect();
            if !received.is_empty() {
                found.insert(u64::from(socket.inode), received);
            }
        }
        found
    }

    /// Returns the processes whose turn it is.
    fn next_processes(&mut self) -> Vec<i32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let pids: BTreeSet<i32> = pids.collect();
        let after = self.last_read.saturating_add(1);
        let turns = pids.range(after..).chain(pids.range(..after));
        let turns: Vec<i32> = turns.take(PROCESSES_PER_CALL).copied().collect();
        self.last_read = turns.last().copied().unwrap_or(0);
        turns
    }
}

/// Returns the services at which a process listens.
fn services_of(pid: i32, sockets: &HashMap<u64, Services>) -> Services {
    let mut found = Services::new();
    let entries = fs::read_dir(format!("/proc/{pid}/fd"));
    for entry in entries
        .into_iter()
        .flatten()
        .flatten()
        .take(DESCRIPTORS_MAX)
    {
        let link = fs::read_link(entry.path()).unwrap_or_default();
        let inode = link.to_str().and_then(inode_of_link);
        if let Some(services) = inode.and_then(|inode| sockets.get(&inode)) {
            found.extend(services.iter().copied());
        }
    }
    found
}

/// Parses `socket:[INODE]`.
fn inode_of_link(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

fn parent_of(pid: i32) -> Option<i32> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_sockets_are_parsed() {
        assert_eq!(inode_of_link("socket:[4711]"), Some(4711));
        for text in ["", "pipe:[1]", "socket:[]", "socket:[x]", "socket:[1"] {
            assert_eq!(inode_of_link(text), None, "{text}");
        }
    }

    #[test]
    fn process_without_listener_of_a_service_is_none() {
        let mut finder = ServerProcesses::new().expect("a netlink socket");
        assert!(finder.find(&[]).is_empty());
        // Nobody listens at the discard port of a documentation address.
        assert!(
            finder
                .find(&["192.0.2.1:9".parse().expect("an address")])
                .is_empty()
        );
    }
}
