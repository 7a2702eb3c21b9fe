//! The stored state of a lab, in `/run/holdfast/lab/<name>`, from which other processes can use the lab and clean it
//! up.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::{
    address_plan::AddressPlan,
    error::{Error, ErrorContext, Result},
    lab_spec::{ServiceReach, validate_name},
    namespace::ProcessRef,
    processor_limit::ProcessorGroup,
    topology::DuplexLinkConfig,
};

const LABS_ROOT: &str = "/run/holdfast/lab";

/// Maximum time to wait for a lock that a lab's last owner may still hold.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// A lab as other processes see it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LabState {
    pub name: String,
    pub plan: AddressPlan,
    pub reach: ServiceReach,
    pub keep: bool,
    /// The process that brought the lab up.
    pub owner: ProcessRef,
    /// The program with the hidden roles.
    pub program: PathBuf,
    /// The parent of the hosts' control groups.
    pub cgroup: PathBuf,
    /// Processors of each node; none for all of the machine.
    #[serde(default)]
    pub processors: Option<f64>,
    /// Control groups of version 1 that limit the processors, by host.
    #[serde(default)]
    pub processor_groups: BTreeMap<String, ProcessorGroup>,
    /// The init process of each host and of the switch.
    pub inits: BTreeMap<String, ProcessRef>,
    /// The links that are not plain.
    pub links: BTreeMap<String, DuplexLinkConfig>,
    pub link_program: Option<ProcessRef>,
    /// Isolated hosts.
    pub cut: BTreeSet<String>,
    /// Pairs of hosts that are cut off from each other, in order of name.
    pub cut_between: BTreeSet<(String, String)>,
    /// True if the lab is completely up. If false, a process is bringing the lab up or down, or was killed while doing
    /// so.
    pub ready: bool,
}

impl LabState {
    /// Reads the stored state of a lab.
    pub(crate) fn load(name: &str) -> Result<LabState> {
        validate_name(name)?;
        let path = lab_directory(name).join("state.json");
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::NoLab(name.into()));
            }
            text => text.context(|| format!("read {}", path.display()))?,
        };
        serde_json::from_slice(&text)
            .map_err(|error| Error::Invalid(format!("{}: {error}", path.display())))
    }

    /// Stores the state atomically: a reader sees the old or the new version.
    pub(crate) fn save(&self) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::from);
        let text = text.context(|| "encode the lab's state".into())?;
        write_atomically(&lab_directory(&self.name).join("state.json"), &text)
    }

    /// Returns true if the lab is up: all hosts run, and so does the owner of a lab that depends on its owner.
    pub(crate) fn is_alive(&self) -> bool {
        self.ready
            && (self.keep || self.owner.is_alive())
            && self.inits.values().all(ProcessRef::is_alive)
    }

    /// Returns true if the lab is still in use: its owner runs or, for a lab without owner, a host.
    pub(crate) fn is_in_use(&self) -> bool {
        match self.keep {
            true => self.ready && self.inits.values().any(ProcessRef::is_alive),
            false => self.owner.is_alive(),
        }
    }

    /// Returns the link of a host if the kernel enforces its rates.
    pub fn kernel_link(&self, host: &str) -> Option<&DuplexLinkConfig> {
        self.links.get(host).filter(|link| link.kernel)
    }

    /// Returns true if the link program carries the packets of a host.
    pub fn is_spliced(&self, host: &str) -> bool {
        self.links.get(host).is_some_and(|link| !link.kernel)
    }

    pub(crate) fn counters_path(&self) -> PathBuf {
        lab_directory(&self.name).join("links.json")
    }

    pub(crate) fn host_cgroup(&self, host: &str) -> PathBuf {
        self.cgroup.join(host)
    }

    /// Returns the init process of a host, or of the switch.
    pub(crate) fn host_init(&self, host: &str) -> Result<&ProcessRef> {
        let missing = || Error::NoHost {
            lab: self.name.clone(),
            host: host.into(),
        };
        self.inits.get(host).ok_or_else(missing)
    }
}

/// Replaces a file atomically.
pub(crate) fn write_atomically(path: &Path, text: &[u8]) -> Result<()> {
    let draft = path.with_extension("draft");
    let write = || fs::write(&draft, text).and_then(|()| fs::rename(&draft, path));
    write().context(|| format!("write {}", path.display()))
}

/// Returns the directory of a lab's files.
pub(crate) fn lab_directory(name: &str) -> PathBuf {
    Path::new(LABS_ROOT).join(name)
}

/// Returns the names of all labs with files.
pub(crate) fn lab_names() -> Vec<String> {
    let Ok(entries) = fs::read_dir(LABS_ROOT) else {
        return Vec::new();
    };
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// A lock on a directory, held until dropped or until the process dies.
pub(crate) struct LabLock {
    _held: Flock<File>,
}

impl LabLock {
    /// Locks the directory of all labs, creating it if missing: held while a number is chosen.
    pub(crate) fn lock_root() -> Result<LabLock> {
        LabLock::acquire(Path::new(LABS_ROOT), true, FlockArg::LockExclusive)?
            .ok_or_else(|| Error::Busy("(all)".into()))
    }

    /// Locks a lab that is being created, without waiting. Creates its directory.
    pub(crate) fn lock_new(name: &str) -> Result<LabLock> {
        LabLock::acquire(&lab_directory(name), true, FlockArg::LockExclusiveNonblock)?
            .ok_or_else(|| Error::Busy(name.into()))
    }

    /// Locks a lab that is being created, and waits briefly: a process started by a killed owner may hold the lock a
    /// moment longer.
    pub(crate) fn lock_new_with_timeout(name: &str) -> Result<LabLock> {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match LabLock::lock_new(name) {
                Err(Error::Busy(_)) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(10))
                }
                taken => return taken,
            }
        }
    }

    /// Locks an existing lab, and waits for the lock.
    pub(crate) fn lock_existing(name: &str) -> Result<LabLock> {
        LabLock::acquire(&lab_directory(name), false, FlockArg::LockExclusive)?
            .ok_or_else(|| Error::NoLab(name.into()))
    }

    /// Returns none if another process holds the lock (without waiting), or if the directory is missing and must not be
    /// created.
    fn acquire(path: &Path, create: bool, mode: FlockArg) -> Result<Option<LabLock>> {
        let describe = || format!("lock {}", path.display());
        loop {
            if create {
                match fs::create_dir_all(path) {
                    // Another process removed the last lab, and the parent directory, in the middle of the call: try
                    // again.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    made => made.context(describe)?,
                }
            }
            let file = match File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && create => continue,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                file => file.context(describe)?,
            };
            let inode = file.metadata().context(describe)?.ino();
            let held = match Flock::lock(file, mode) {
                Ok(held) => held,
                Err((_, nix::Error::EWOULDBLOCK)) => return Ok(None),
                Err((_, nix::Error::EINTR)) => continue,
                Err((_, error)) => return Err(error).context(describe),
            };
            // The previous holder may have removed the directory: then this lock is on a deleted directory.
            if fs::metadata(path).is_ok_and(|now| now.ino() == inode) {
                return Ok(Some(LabLock { _held: held }));
            }
        }
    }
}

/// Removes a lab's files, and the parent directories if this was the last lab.
pub(crate) fn remove_lab_files(name: &str) -> Result<()> {
    let path = lab_directory(name);
    match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).context(|| format!("remove {}", path.display()));
        }
        _ => {}
    }
    remove_root_if_empty();
    Ok(())
}

/// Removes the parent directories of the labs if no lab is left.
pub(crate) fn remove_root_if_empty() {
    // Fails if another lab is up, or a daemon has files there, which is no error.
    if fs::remove_dir(LABS_ROOT).is_ok() {
        let _ = fs::remove_dir("/run/holdfast");
    }
}
