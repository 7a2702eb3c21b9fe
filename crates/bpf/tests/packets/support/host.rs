//! A host: a network namespace made with `ip`, and for nodes a separate cgroup, so that socket operations see only the
//! node's sockets.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;

/// A network namespace, removed when dropped.
pub struct Host {
    namespace: String,
    cgroup: Option<PathBuf>,
}

impl Host {
    /// Creates the namespace `namespace`, and a cgroup if `cgroup` is true.
    pub fn new(namespace: &str, cgroup: bool) -> Self {
        ip(&["netns", "add", namespace]);
        let host = Self {
            namespace: namespace.to_owned(),
            cgroup: cgroup.then(|| new_cgroup(namespace)),
        };
        host.ip("link set lo up");
        host.sysctl("net/ipv6/conf/default/accept_dad", "0");
        host.sysctl("net/ipv4/conf/all/rp_filter", "0");
        host.sysctl("net/ipv4/conf/default/rp_filter", "0");
        // A redirect would sooner or later bypass the router, and its decrement of the hop limit.
        for conf in ["all", "default"] {
            host.sysctl(&format!("net/ipv4/conf/{conf}/accept_redirects"), "0");
            host.sysctl(&format!("net/ipv6/conf/{conf}/accept_redirects"), "0");
        }
        host
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn is_node(&self) -> bool {
        self.cgroup.is_some()
    }

    /// Returns the cgroup of a node.
    pub fn cgroup(&self) -> &PathBuf {
        self.cgroup.as_ref().expect("only nodes have a cgroup")
    }

    /// Runs `work` on a thread inside the namespace (and the cgroup). Threads that it starts are inside too.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                self.enter();
                work()
            });
            match inside.join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    fn enter(&self) {
        let namespace = File::open(format!("/run/netns/{}", self.namespace)).expect("namespace");
        // SAFETY: the descriptor is open; only the calling thread changes its namespace.
        let entered = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(entered, 0, "setns: {}", std::io::Error::last_os_error());
        if let Some(cgroup) = &self.cgroup {
            std::fs::write(cgroup.join("cgroup.threads"), "0").expect("enter the cgroup");
        }
    }

    /// Runs `ip ARGUMENTS` in the namespace.
    pub fn ip(&self, arguments: &str) {
        let mut all = vec!["-n", &self.namespace];
        all.extend(arguments.split(' '));
        ip(&all);
    }

    /// Waits until a device can send: earlier packets would be lost.
    pub fn wait_until_up(&self, device: &str) {
        super::lab::eventually("the device is up", || {
            self.ip_output(&format!("link show {device}"))
                .contains("state UP")
        });
    }

    /// Returns the output of `ip ARGUMENTS` in the namespace.
    pub fn ip_output(&self, arguments: &str) -> String {
        let mut command = Command::new("ip");
        command
            .args(["-n", &self.namespace])
            .args(arguments.split(' '));
        String::from_utf8_lossy(&command.output().expect("ip").stdout).into_owned()
    }

    /// Runs `ethtool -K DEVICE FEATURE SETTING`.
    pub fn feature(&self, device: &str, feature: &str, setting: &str) {
        self.run(|| {
            let status = Command::new("ethtool")
                .args(["-K", device, feature, setting])
                .output()
                .expect("ethtool");
            assert!(status.status.success(), "ethtool {device}: {status:?}");
        });
    }

    /// Writes a value below `/proc/sys`.
    pub fn sysctl(&self, path: &str, value: &str) {
        self.run(|| {
            std::fs::write(format!("/proc/sys/{path}"), value)
                .unwrap_or_else(|e| panic!("sysctl {path}: {e}"));
        });
    }

    /// Returns the index of a device.
    pub fn ifindex(&self, device: &str) -> u32 {
        let name = std::ffi::CString::new(device).expect("name");
        // SAFETY: `name` is a NUL-terminated string that lives through the call.
        self.run(|| unsafe { libc::if_nametoindex(name.as_ptr()) })
    }

    /// Returns a counter of `/proc/net/snmp`, for instance `Tcp`, `OutRsts`, or, for the group `TcpExt`, of
    /// `/proc/net/netstat`.
    pub fn snmp(&self, group: &str, name: &str) -> u64 {
        let file = if group == "TcpExt" { "netstat" } else { "snmp" };
        let path = format!("/proc/thread-self/net/{file}");
        let text = self.run(|| std::fs::read_to_string(&path).expect(file));
        let mut rows = text
            .lines()
            .filter_map(|line| line.strip_prefix(&format!("{group}: ")));
        let (names, values) = (rows.next().expect("names"), rows.next().expect("values"));
        let column = names.split(' ').position(|n| n == name).expect("counter");
        values
            .split(' ')
            .nth(column)
            .and_then(|v| v.parse().ok())
            .expect("a number")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A failure here means that the namespace is gone already.
        let _ = Command::new("ip")
            .args(["netns", "del", &self.namespace])
            .output();
        if let Some(cgroup) = &self.cgroup {
            // A joined thread may still be exiting.
            for _ in 0..500 {
                if std::fs::remove_dir(cgroup).is_ok() {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        }
    }
}

/// Runs `ip`, and asserts that it succeeds.
pub fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().expect("ip");
    assert!(
        output.status.success(),
        "ip {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Creates a threaded cgroup directly below the root, so that threads of one process can be in different cgroups.
fn new_cgroup(name: &str) -> PathBuf {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let root = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .find(|fields| fields[2] == "cgroup2")
        .map(|fields| PathBuf::from(fields[1]))
        .expect("cgroup2 is mounted");
    let own_cgroup = std::fs::read_to_string("/proc/self/cgroup").expect("cgroup");
    if !own_cgroup.lines().any(|line| line == "0::/") {
        std::fs::write(root.join("cgroup.procs"), "0").expect("move to the root cgroup");
    }
    let path = root.join(name);
    std::fs::create_dir(&path).expect("new cgroup");
    let mut kind = File::options()
        .write(true)
        .open(path.join("cgroup.type"))
        .expect("type");
    kind.write_all(b"threaded").expect("a threaded cgroup");
    path
}
