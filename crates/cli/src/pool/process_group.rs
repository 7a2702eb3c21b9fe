//! Listening addresses and processor time of a process group, from /proc.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// State LISTEN in /proc/net/tcp.
const LISTEN_STATE: &str = "0A";

/// A process of a process group, and the processor time that the process has used.
pub struct GroupProcess {
    /// PID of the process.
    pub id: i32,
    /// Processor time, user and system, in hundredths of a second (`USER_HZ`).
    pub used_ticks: u64,
    /// Processor time of the process's children that have ended and were waited for, in hundredths of a second.
    pub children_ticks: u64,
}

/// Returns the processes of a group.
pub fn group_processes(id: i32) -> Vec<GroupProcess> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let (group, used_ticks, children_ticks) = parse_stat(&stat)?;
        (group == id).then_some(GroupProcess {
            id: number,
            used_ticks,
            children_ticks,
        })
    });
    processes.collect()
}

/// Parses process group, own and children's processor time from /proc/PID/stat (proc(5)).
fn parse_stat(stat: &str) -> Option<(i32, u64, u64)> {
    // The process name may contain any characters, but no later field contains a parenthesis.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let group = fields.get(2)?.parse().ok()?;
    let used = number(11)? + number(12)?;
    Some((group, used, number(13)? + number(14)?))
}

/// Returns the TCP addresses on which processes of the group listen, each in its network namespace.
pub fn listeners(group_id: i32) -> BTreeSet<SocketAddr> {
    let processes = group_processes(group_id);
    let sockets: HashSet<u64> = processes.iter().flat_map(socket_inodes).collect();
    let mut namespaces_seen = HashSet::new();
    let mut addresses = BTreeSet::new();
    for process in &processes {
        let namespace = fs::read_link(format!("/proc/{}/ns/net", process.id)).ok();
        if namespace
            .as_ref()
            .is_none_or(|known| namespaces_seen.contains(known))
        {
            continue;
        }
        // The process may end at any time: then read from another one of its namespace.
        let Ok(lines) = socket_table(process) else {
            continue;
        };
        namespaces_seen.extend(namespace);
        let listeners = lines.lines().filter_map(parse_listener);
        let own_listeners = listeners.filter(|(_, inode)| sockets.contains(inode));
        addresses.extend(own_listeners.map(|(address, _)| address));
    }
    addresses
}

/// Returns the TCP sockets of a process's network namespace, one per line.
fn socket_table(process: &GroupProcess) -> io::Result<String> {
    let table = |name| fs::read_to_string(format!("/proc/{}/net/{name}", process.id));
    Ok(table("tcp")? + &table("tcp6").unwrap_or_default())
}

/// Returns the inodes of a process's sockets.
fn socket_inodes(process: &GroupProcess) -> Vec<u64> {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", process.id));
    let descriptors = descriptors.into_iter().flatten().flatten();
    let inode = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        let number = target.to_str()?.strip_prefix("socket:[")?;
        number.strip_suffix(']')?.parse().ok()
    };
    descriptors.filter_map(inode).collect()
}

/// Parses the address and inode of a listener from a line of /proc/net/tcp or tcp6.
fn parse_listener(line: &str) -> Option<(SocketAddr, u64)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    if *fields.get(3)? != LISTEN_STATE {
        return None;
    }
    let (address, port) = fields.get(1)?.split_once(':')?;
    let address = parse_address(address)?;
    let port = u16::from_str_radix(port, 16).ok()?;
    Some((SocketAddr::new(address, port), fields.get(9)?.parse().ok()?))
}

/// Parses words of 32 bits in native byte order.
fn parse_address(text: &str) -> Option<IpAddr> {
    let mut bytes = Vec::new();
    for start in (0..text.len()).step_by(8) {
        let word = u32::from_str_radix(text.get(start..start + 8)?, 16).ok()?;
        bytes.extend(word.to_ne_bytes());
    }
    if let Ok(bytes) = <[u8; 4]>::try_from(bytes.as_slice()) {
        return Some(Ipv4Addr::from(bytes).into());
    }
    let address = Ipv6Addr::from(<[u8; 16]>::try_from(bytes.as_slice()).ok()?);
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    /// A process in a group, killed at the end of the test.
    struct ListeningChild(Child);

    impl ListeningChild {
        fn start(command: &mut Command, group: i32) -> ListeningChild {
            ListeningChild(command.process_group(group).spawn().unwrap())
        }

        fn id(&self) -> i32 {
            self.0.id().try_into().unwrap()
        }
    }

    impl Drop for ListeningChild {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Returns a listener's address, and a process in a group that owns the listener.
    fn start_listener(group: i32) -> (SocketAddr, ListeningChild) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let mut command = Command::new("sleep");
        command.arg("600").stdin(OwnedFd::from(listener));
        (at, ListeningChild::start(&mut command, group))
    }

    #[test]
    fn a_group_s_listener_is_found() {
        let (at, process) = start_listener(0);
        let group = process.id();
        assert!(listeners(group).contains(&at));
        drop(process);
        assert!(!listeners(group).contains(&at));
    }

    #[test]
    fn group_leader_may_be_elsewhere_or_ended() {
        let mut command = Command::new("unshare");
        let mut first = ListeningChild::start(command.args(["--net", "sleep", "600"]), 0);
        let (at, _second) = start_listener(first.id());
        let elsewhere = || {
            let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
            of("self") != of(&first.id().to_string())
        };
        while !elsewhere() {
            sleep(Duration::from_millis(1));
        }
        assert!(listeners(first.id()).contains(&at));
        first.0.kill().unwrap();
        while fs::read_link(format!("/proc/{}/ns/net", first.id())).is_ok() {
            sleep(Duration::from_millis(1));
        }
        assert!(listeners(first.id()).contains(&at));
    }

    #[test]
    fn stat_with_any_process_name_is_parsed() {
        let stat = "7 (a) b) S 1 42 42 0 -1 4194304 1 2 3 4 100 23 5 6 20 0 1 0 9 0 0";
        assert_eq!(parse_stat(stat), Some((42, 123, 11)));
        assert_eq!(parse_stat("7 (a"), None);
    }

    #[test]
    fn proc_net_lines_are_parsed() {
        let v4 =
            "   0: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 77 1";
        if cfg!(target_endian = "little") {
            let at = "127.0.0.1:80".parse().unwrap();
            assert_eq!(parse_listener(v4), Some((at, 77)));
        }
        let any = v4.replace("0100007F", &"0".repeat(32));
        let at = "[::]:80".parse().unwrap();
        assert_eq!(parse_listener(&any), Some((at, 77)));
        assert_eq!(parse_listener(&v4.replace(" 0A ", " 01 ")), None);
        assert_eq!(parse_listener("short"), None);
    }
}
