//! The test network: a generator, a contact node and two owners, each a namespace, with veth pairs between them.
//!
//! The contact node has two interfaces towards the generator, which differ only in the receiver of the packets: the
//! kernel's IP forwarding at `by-kernel`, the steering program at `by-steer`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, setns};
use nix::unistd::Pid;

use holdfast_testbed::process_lab::find_system_program;

/// Processor of the generator.
pub const GENERATOR_CPU: usize = 0;
/// Processor of the contact node's forwarding and of the owners' receipt.
pub const CONTACT_CPU: usize = 1;

/// Returns a link address by the number of the pair, for its near (0) or far (1) end.
pub fn link_address(pair: u8, end: u8) -> [u8; 6] {
    [2, 0x48, 0x46, 0, pair, end]
}

/// One veth pair: namespace and interface of each end.
struct VethPair {
    near: (&'static str, &'static str),
    far: (&'static str, &'static str),
}

/// Pairs of the network: generator to contact node for the kernel, and for the steering program; contact node to owner
/// for packets forwarded by the kernel, to both owners on one segment, and to both owners by encapsulation. An owner's
/// interface has only the programs of its form.
const VETH_PAIRS: [VethPair; 7] = [
    VethPair {
        near: ("g", "to-kernel"),
        far: ("s", "by-kernel"),
    },
    VethPair {
        near: ("g", "to-steer"),
        far: ("s", "by-steer"),
    },
    VethPair {
        near: ("s", "plain0"),
        far: ("o0", "plain"),
    },
    VethPair {
        near: ("s", "link0"),
        far: ("o0", "link"),
    },
    VethPair {
        near: ("s", "link1"),
        far: ("o1", "link"),
    },
    VethPair {
        near: ("s", "encap0"),
        far: ("o0", "encap"),
    },
    VethPair {
        near: ("s", "encap1"),
        far: ("o1", "encap"),
    },
];
/// Number of the pair by which the kernel reaches owner 0.
const KERNEL_PAIR: u8 = 2;
/// Number of the pair to owner 0 on one segment; owner 1 has the next.
pub const LINK_PAIR: u8 = 3;
/// Number of the pair to owner 0 by encapsulation; owner 1 has the next.
pub const ENCAP_PAIR: u8 = 5;

/// Directory of the runs' own bpf file systems.
const PINS_DIRECTORY: &str = "/run/holdfast-bench";

/// The namespaces; dropping this value removes them.
pub struct TestNetwork {
    prefix: String,
    /// Directory in which the data planes pin their maps.
    pub pins: PathBuf,
}

impl TestNetwork {
    /// Creates the namespaces and the links.
    ///
    /// # Errors
    /// `ip` or `ethtool` is missing or fails.
    pub fn new() -> Result<Self> {
        // Checked first, because `ip netns exec` does not name a missing program.
        find_system_program("ip", "iproute2")?;
        find_system_program("ethtool", "ethtool")?;
        remove_remains();
        let prefix = format!("hfs{}", std::process::id());
        let pins = Path::new(PINS_DIRECTORY).join(&prefix);
        let place = Self { prefix, pins };
        std::fs::create_dir_all(&place.pins)?;
        // A bpf file system of its own: not every machine has one at /sys/fs/bpf.
        let (none, flags) = (None::<&str>, MsFlags::empty());
        mount(Some("bpf"), &place.pins, Some("bpf"), flags, none)
            .with_context(|| format!("mount a bpf file system at {}", place.pins.display()))?;
        for host in ["g", "s", "o0", "o1"] {
            place.run_program("ip", &format!("netns add {}", place.namespace_name(host)))?;
            for family in ["all", "default"] {
                place.write_sysctl(host, &format!("net/ipv4/conf/{family}/rp_filter"), "0")?;
            }
            place.write_sysctl(host, "net/ipv6/conf/default/disable_ipv6", "1")?;
        }
        place.write_sysctl("s", "net/ipv4/ip_forward", "1")?;
        for (number, pair) in (0u8..).zip(&VETH_PAIRS) {
            place.add_pair(number, pair)?;
        }
        place.add_kernel_route()?;
        Ok(place)
    }

    fn add_pair(&self, number: u8, pair: &VethPair) -> Result<()> {
        let address = |end| {
            link_address(number, end)
                .map(|byte| format!("{byte:02x}"))
                .join(":")
        };
        let ((near, near_device), (far, far_device)) = (pair.near, pair.far);
        let queues = "numrxqueues 1 numtxqueues 1";
        self.run_ip(near, &format!(
            "link add {near_device} address {} {queues} type veth peer name {far_device} address {} {queues} netns {}",
            address(0),
            address(1),
            self.namespace_name(far)
        ))?;
        for (end, host, device) in [(1, near, near_device), (2, far, far_device)] {
            self.run_ip(
                host,
                &format!("addr add 10.98.{number}.{end}/24 dev {device}"),
            )?;
            self.run_ip(host, &format!("link set dev {device} up"))?;
            // veth accepts redirected frames only with NAPI, and the other end notices it only while this end is up.
            let exec = format!(
                "netns exec {} ethtool -K {device} gro on",
                self.namespace_name(host)
            );
            self.run_program("ip", &exec)?;
        }
        Ok(())
    }

    /// Adds the kernel's route to the service: by owner 0, with a permanent neighbour entry.
    fn add_kernel_route(&self) -> Result<()> {
        let link = link_address(KERNEL_PAIR, 1)
            .map(|byte| format!("{byte:02x}"))
            .join(":");
        self.run_ip(
            "s",
            &format!("neigh replace 10.98.{KERNEL_PAIR}.2 lladdr {link} nud permanent dev plain0"),
        )?;
        self.run_ip(
            "s",
            &format!("route add 10.98.255.1/32 via 10.98.{KERNEL_PAIR}.2 dev plain0"),
        )
    }

    /// Gives an interface's NAPI a thread of its own on [`CONTACT_CPU`], at the highest ordinary priority; returns the
    /// thread's id.
    ///
    /// # Errors
    /// The kernel has no threaded NAPI.
    pub fn enable_napi_thread(&self, device: &str) -> Result<Pid> {
        let before = napi_threads()?;
        let command = format!("echo 1 > /sys/class/net/{device}/threaded");
        let output = Command::new("ip")
            .args([
                "netns",
                "exec",
                &self.namespace_name("s"),
                "sh",
                "-c",
                &command,
            ])
            .output()
            .context("run ip netns exec")?;
        if !output.status.success() {
            bail!(
                "cannot enable threaded NAPI for {device}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        let new: Vec<Pid> = napi_threads()?
            .into_iter()
            .filter(|pid| !before.contains(pid))
            .collect();
        let &[thread] = new.as_slice() else {
            bail!("{device} has {} NAPI threads, one was expected", new.len());
        };
        pin_thread(thread, CONTACT_CPU)?;
        self.run_program("renice", &format!("-n -20 -p {thread}"))?;
        Ok(thread)
    }

    /// Runs `work` on a thread in a namespace.
    ///
    /// # Errors
    /// The namespace cannot be entered, or `work` fails.
    pub fn run_in_namespace<T: Send>(
        &self,
        host: &str,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        let namespace = File::open(format!("/run/netns/{}", self.namespace_name(host)))?;
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                setns(namespace, CloneFlags::CLONE_NEWNET)?;
                work()
            });
            inside
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Returns the index of an interface.
    ///
    /// # Errors
    /// There is no interface of this name.
    pub fn ifindex(&self, host: &str, device: &str) -> Result<u32> {
        self.run_in_namespace(host, || Ok(nix::net::if_::if_nametoindex(device)?))
    }

    fn write_sysctl(&self, host: &str, path: &str, value: &str) -> Result<()> {
        self.run_in_namespace(host, || {
            std::fs::write(format!("/proc/sys/{path}"), value)
                .with_context(|| format!("set {path}"))
        })
    }

    fn namespace_name(&self, host: &str) -> String {
        format!("{}-{host}", self.prefix)
    }

    fn run_ip(&self, host: &str, arguments: &str) -> Result<()> {
        self.run_program(
            "ip",
            &format!("-n {} {arguments}", self.namespace_name(host)),
        )
    }

    fn run_program(&self, program: &str, arguments: &str) -> Result<()> {
        let output = Command::new(program)
            .args(arguments.split(' '))
            .output()
            .with_context(|| format!("run {program}"))?;
        if !output.status.success() {
            bail!(
                "{program} {arguments}: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }
}

impl Drop for TestNetwork {
    fn drop(&mut self) {
        for host in ["g", "s", "o0", "o1"] {
            // A namespace that was never created cannot be removed.
            let _ = self.run_program("ip", &format!("netns del {}", self.namespace_name(host)));
        }
        unmount_pins(&self.pins);
    }
}

/// Removes the remains of runs that were killed.
fn remove_remains() {
    let names = |directory: &str| -> Vec<String> {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    };
    let is_dead = |name: &str| {
        let owner = name
            .strip_prefix("hfs")
            .and_then(|rest| rest.split('-').next());
        owner
            .and_then(|pid| pid.parse::<u32>().ok())
            .is_some_and(|pid| !PathBuf::from(format!("/proc/{pid}")).exists())
    };
    // Remains that cannot be removed do no harm: every run has names of its own.
    for namespace in names("/run/netns").iter().filter(|name| is_dead(name)) {
        let _ = Command::new("ip")
            .args(["netns", "del", namespace])
            .output();
    }
    for pins in names(PINS_DIRECTORY).iter().filter(|name| is_dead(name)) {
        unmount_pins(&Path::new(PINS_DIRECTORY).join(pins));
    }
}

fn unmount_pins(pins: &Path) {
    let _ = umount2(pins, MntFlags::MNT_DETACH);
    let _ = std::fs::remove_dir(pins);
}

/// Pins a thread to a processor.
///
/// # Errors
/// There is no such processor.
pub fn pin_thread(thread: Pid, cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(thread, &set).with_context(|| format!("pin to processor {cpu}"))
}

/// Returns the kernel threads that poll network interfaces.
fn napi_threads() -> Result<Vec<Pid>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // A process that has ended meanwhile does not count.
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if name.starts_with("napi/") {
            found.push(Pid::from_raw(pid));
        }
    }
    Ok(found)
}
