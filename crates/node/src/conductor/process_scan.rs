//! The thread that finds the managed processes of this node, and checks whether they can move. To read `/proc` would delay the
//! engine's other work.
//!
//! A managed process is the first process of a tree that serves the group: the tree has a socket at which clients of a
//! service arrive, or has moved here. Server programs with a session at this daemon are not managed: their connections are
//! handed off, and the programs stay.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use holdfast_api::control::ProcessCheck;
use holdfast_checkpoint::inspect::tree_pids;
use holdfast_checkpoint::procfs::{ProcStat, threads};
use holdfast_sys::netlink::Netlink;
use holdfast_sys::sock_diag::{self, ListedServerSocket, tcp_listeners, udp_receivers};
use holdfast_wire::Protocol;
use holdfast_wire::health_frames::ServiceEndpoint;
use tokio::sync::mpsc;

use crate::migration::{MovableAddresses, check_process};

/// Most managed processes.
const PROCESSES_MAX: usize = 4_096;
/// Time for which a check counts if the process can move.
const MOVABLE_CHECK_LIFETIME: Duration = Duration::from_secs(60);
/// Time for which a check counts if the process cannot move: the obstacle may go away.
const BLOCKED_CHECK_LIFETIME: Duration = Duration::from_secs(10);

/// Number of processes to check in a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CheckScope {
    /// No process: nothing is to move.
    None,
    /// The process whose last check is the oldest, if that is out of date.
    One,
    /// All processes whose last checks are out of date.
    Outdated,
    /// All processes.
    All,
}

/// Request for a scan of this node's managed processes.
#[derive(Debug)]
pub(crate) struct ScanRequest {
    /// Number that the scan repeats.
    pub number: u64,
    /// The services of the group.
    pub services: Vec<ServiceEndpoint>,
    /// Roots of the trees that have moved here.
    pub residents: BTreeSet<i32>,
    /// Server programs with a session at this daemon.
    pub sessions: BTreeSet<i32>,
    /// Addresses whose sockets can move.
    pub addresses: MovableAddresses,
    /// The checks to make.
    pub checks: CheckScope,
}

/// A managed process, as a scan found it.
#[derive(Debug)]
pub(crate) struct ScannedProcess {
    /// PID of the root of the tree.
    pub pid: i32,
    /// Start of the root in ticks since boot: distinguishes processes that have the PID one after the other.
    pub started_ticks: u64,
    /// Name of the root (`comm`).
    pub name: String,
    /// The last check, as text if it failed; none before the first one.
    pub check: Option<Result<ProcessCheck, String>>,
}

/// Result of a scan of this node's managed processes.
#[derive(Debug)]
pub(crate) struct Scan {
    /// Number of the request for the scan.
    pub number: u64,
    /// The managed processes that the scan found.
    pub processes: Vec<ScannedProcess>,
}

/// Thread that scans the managed processes; ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct ProcessScanner {
    requests: SyncSender<ScanRequest>,
}

impl ProcessScanner {
    /// Starts the scanning thread, with the privileges of the calling thread.
    ///
    /// # Errors
    /// There is no memory for a thread, or no descriptor for its netlink socket.
    pub fn start(results: mpsc::Sender<Scan>) -> io::Result<ProcessScanner> {
        let netlink = sock_diag::open()?;
        let (requests, receiver) = sync_channel(1);
        std::thread::Builder::new()
            .name("managed-procs".to_owned())
            .spawn(move || run(netlink, &receiver, &results))?;
        Ok(ProcessScanner { requests })
    }

    /// Requests a scan. Returns false while another one waits.
    pub fn request(&self, request: ScanRequest) -> bool {
        self.requests.try_send(request).is_ok()
    }
}

fn run(netlink: Netlink, requests: &Receiver<ScanRequest>, results: &mpsc::Sender<Scan>) {
    let mut finder = ProcessFinder::new(netlink);
    let mut is_failing = false;
    while let Ok(request) = requests.recv() {
        match finder.scan(&request) {
            Ok(scan) => {
                is_failing = false;
                if results.blocking_send(scan).is_err() {
                    return;
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    tracing::warn!(%error, "cannot list the processes that serve: this node takes part in no balancing");
                }
            }
        }
    }
}

/// Identity of a process: PID and start in ticks since boot.
type ProcessIdentity = (i32, u64);

/// The last check of a process of an earlier scan.
#[derive(Debug, Default)]
struct KnownProcess {
    check: Option<(Instant, Result<ProcessCheck, String>)>,
}

impl KnownProcess {
    /// Returns true if the last check is out of date, or none was made.
    fn is_check_due(&self, now: Instant) -> bool {
        self.check.as_ref().is_none_or(|(at, result)| {
            let is_movable = result.as_ref().is_ok_and(|check| check.movable);
            let lifetime = match is_movable {
                true => MOVABLE_CHECK_LIFETIME,
                false => BLOCKED_CHECK_LIFETIME,
            };
            now.saturating_duration_since(*at) >= lifetime
        })
    }
}

struct ProcessFinder {
    netlink: Netlink,
    /// Inodes of the sockets of services at the last search, and the processes that had them.
    inodes: BTreeSet<u32>,
    owners: BTreeSet<ProcessIdentity>,
    known: BTreeMap<ProcessIdentity, KnownProcess>,
}

impl ProcessFinder {
    fn new(netlink: Netlink) -> ProcessFinder {
        ProcessFinder {
            netlink,
            inodes: BTreeSet::new(),
            owners: BTreeSet::new(),
            known: BTreeMap::new(),
        }
    }

    fn scan(&mut self, request: &ScanRequest) -> io::Result<Scan> {
        self.find_owners(&request.services)?;
        let mut former = std::mem::take(&mut self.known);
        let mut processes = Vec::new();
        for root in self
            .roots(&request.residents)
            .into_iter()
            .take(PROCESSES_MAX)
        {
            let Some(process) = find_process(root, &request.sessions) else {
                continue;
            };
            let identity = (process.pid, process.started_ticks);
            let known = former.remove(&identity).unwrap_or_default();
            self.known.insert(identity, known);
            processes.push(process);
        }
        self.check(request);
        for process in &mut processes {
            let known = self.known.get(&(process.pid, process.started_ticks));
            let check = known.and_then(|known| known.check.as_ref());
            process.check = check.map(|(_, result)| result.clone());
        }
        // The children of a server that has just moved away end after it, and would pass for processes that cannot move.
        let is_refused = |process: &ScannedProcess| matches!(process.check, Some(Err(_)));
        processes.retain(|process| !is_refused(process) || !has_ended(process.pid));
        Ok(Scan {
            number: request.number,
            processes,
        })
    }

    /// Finds the processes with sockets at which clients of the services arrive. The search reads all descriptors of the
    /// host, and is made only if the sockets or their processes have changed.
    fn find_owners(&mut self, services: &[ServiceEndpoint]) -> io::Result<()> {
        let inodes = self.service_inodes(services)?;
        let is_alive = |(pid, started): &ProcessIdentity| {
            ProcStat::read(*pid).is_ok_and(|stat| stat.started_ticks == *started)
        };
        if inodes == self.inodes && self.owners.iter().all(is_alive) {
            return Ok(());
        }
        self.owners = match inodes.is_empty() {
            true => BTreeSet::new(),
            false => owners_of(&inodes)?,
        };
        self.inodes = inodes;
        Ok(())
    }

    fn service_inodes(&mut self, services: &[ServiceEndpoint]) -> io::Result<BTreeSet<u32>> {
        let has_tcp = services
            .iter()
            .any(|service| service.protocol == Protocol::Tcp);
        let listeners = match has_tcp {
            true => tcp_listeners(&mut self.netlink)?,
            false => Vec::new(),
        };
        let mut inodes = BTreeSet::new();
        let mut add = |sockets: &[ListedServerSocket], service: &ServiceEndpoint| {
            let receiving = sockets
                .iter()
                .filter(|socket| socket.receives(service.address));
            inodes.extend(receiving.map(|socket| socket.inode));
        };
        for service in services {
            match service.protocol {
                Protocol::Tcp => add(&listeners, service),
                _ => add(
                    &udp_receivers(&mut self.netlink, service.address.port())?,
                    service,
                ),
            }
        }
        Ok(inodes)
    }

    /// Returns the roots of the trees that serve: the residents, and the other processes with sockets of services whose
    /// parents have none.
    fn roots(&self, residents: &BTreeSet<i32>) -> BTreeSet<i32> {
        let owners: BTreeSet<i32> = self.owners.iter().map(|(pid, _)| *pid).collect();
        let own = std::process::id().cast_signed();
        let mut roots = residents.clone();
        for owner in &owners {
            let ancestors = ancestors_of(*owner);
            let is_inside = |pid: &i32| residents.contains(pid) || owners.contains(pid);
            if *owner != own && !ancestors.iter().any(is_inside) {
                roots.insert(*owner);
            }
        }
        roots
    }

    /// Makes the requested checks.
    fn check(&mut self, request: &ScanRequest) {
        let now = Instant::now();
        let last = |known: &KnownProcess| known.check.as_ref().map(|(at, _)| *at);
        let processes = self.known.iter_mut();
        let chosen: Vec<(&ProcessIdentity, &mut KnownProcess)> = match request.checks {
            CheckScope::None => Vec::new(),
            CheckScope::All => processes.collect(),
            CheckScope::Outdated => processes
                .filter(|(_, known)| known.is_check_due(now))
                .collect(),
            CheckScope::One => processes
                .filter(|(_, known)| known.is_check_due(now))
                .min_by_key(|(_, known)| last(known))
                .into_iter()
                .collect(),
        };
        for ((pid, _), known) in chosen {
            let result = check_process(*pid, &request.addresses);
            let result = result.map(|(check, _)| check);
            let result = result.map_err(|refusal| refusal.error);
            known.check = Some((Instant::now(), result));
        }
    }
}

/// Returns the process at the root of a tree; none if the root has ended, or a server program of the tree has a session.
fn find_process(root: i32, sessions: &BTreeSet<i32>) -> Option<ScannedProcess> {
    let started_ticks = ProcStat::read(root).ok()?.started_ticks;
    if has_ended(root) {
        return None;
    }
    let tree = tree_pids(root).ok()?;
    if tree.iter().any(|pid| sessions.contains(pid)) {
        return None;
    }
    let name = std::fs::read_to_string(format!("/proc/{root}/comm")).unwrap_or_default();
    Some(ScannedProcess {
        pid: root,
        started_ticks,
        name: name.trim_end().to_owned(),
        check: None,
    })
}

/// Returns true if all threads of a process have ended or are about to; its parent may not have waited for it yet.
fn has_ended(pid: i32) -> bool {
    let is_ending = |thread: i32| ProcStat::read(thread).map_or(true, |stat| stat.is_ending());
    threads(pid).map_or(true, |threads| threads.into_iter().all(is_ending))
}

/// Returns the ancestors of a process, the parent first.
fn ancestors_of(pid: i32) -> Vec<i32> {
    let mut ancestors = Vec::new();
    let mut at = pid;
    while let Ok(stat) = ProcStat::read(at) {
        if stat.parent <= 0 || ancestors.contains(&stat.parent) {
            break;
        }
        at = stat.parent;
        ancestors.push(at);
    }
    ancestors
}

/// Returns the processes of this host that have one of these sockets open.
fn owners_of(inodes: &BTreeSet<u32>) -> io::Result<BTreeSet<ProcessIdentity>> {
    let mut owners = BTreeSet::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if has_socket(pid, inodes)
            && let Ok(stat) = ProcStat::read(pid)
        {
            owners.insert((pid, stat.started_ticks));
        }
    }
    Ok(owners)
}

fn has_socket(pid: i32, inodes: &BTreeSet<u32>) -> bool {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        // The process has ended.
        return false;
    };
    let targets = descriptors
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let mut sockets = targets.filter_map(|target| socket_inode(target.to_str()?));
    sockets.any(|inode| inodes.contains(&inode))
}

/// Returns the inode of the socket that a link in `/proc/PID/fd` names.
fn socket_inode(target: &str) -> Option<u32> {
    let number = target.strip_prefix("socket:[")?.strip_suffix(']')?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{SocketAddr, TcpListener};

    #[test]
    fn links_to_sockets_are_read() {
        assert_eq!(socket_inode("socket:[123]"), Some(123));
        for other in [
            "socket:[]",
            "socket:[12",
            "pipe:[12]",
            "/socket:[1]",
            "socket:[-1]",
        ] {
            assert_eq!(socket_inode(other), None, "{other}");
        }
    }

    #[test]
    fn process_with_a_service_socket_is_found_and_its_child_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let service = ServiceEndpoint {
            protocol: Protocol::Tcp,
            address,
        };
        let mut finder = ProcessFinder::new(sock_diag::open().unwrap());
        finder.find_owners(&[service]).unwrap();
        let own = std::process::id().cast_signed();
        let pids: Vec<i32> = finder.owners.iter().map(|(pid, _)| *pid).collect();
        assert_eq!(pids, [own]);
        // The daemon itself is no managed process.
        assert_eq!(finder.roots(&BTreeSet::new()), BTreeSet::new());
        // A resident's descendants belong to the resident.
        let parent = ProcStat::read(own).unwrap().parent;
        assert_eq!(finder.roots(&[parent].into()), [parent].into());
        drop(listener);
        finder.find_owners(&[service]).unwrap();
        assert_eq!(finder.owners, BTreeSet::new());
    }

    #[test]
    fn process_with_a_session_is_not_managed() {
        let own = std::process::id().cast_signed();
        let process = find_process(own, &BTreeSet::new()).unwrap();
        assert_eq!(process.pid, own);
        assert!(!process.name.is_empty());
        assert!(find_process(own, &[own].into()).is_none());
    }

    #[test]
    fn process_that_waits_for_its_parent_is_not_managed() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        assert!(find_process(pid, &BTreeSet::new()).is_some());
        child.kill().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !has_ended(pid) {
            assert!(Instant::now() < deadline, "exceeded time");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Its entry in /proc is still there.
        assert!(ProcStat::read(pid).is_ok());
        assert!(find_process(pid, &BTreeSet::new()).is_none());
        child.wait().unwrap();
    }
}
