//! The control groups with a lab's processes: `holdfast-lab/<lab>/<host>` in the machine's cgroup2 mount. Cleanup finds
//! all processes of a lab through its control group.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::error::{Error, ErrorContext, Result};

/// The directory under the cgroup2 mount.
const LABS_CGROUP_NAME: &str = "holdfast-lab";

/// Maximum time for killed processes to disappear. Usually they die at once, except on a very busy machine.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the directory with all labs' control groups.
pub(crate) fn labs_cgroup() -> Result<PathBuf> {
    let mounts =
        fs::read_to_string("/proc/self/mounts").context(|| "read /proc/self/mounts".into())?;
    find_mount(&mounts)
        .map(|mount| mount.join(LABS_CGROUP_NAME))
        .ok_or_else(|| {
            let hint = "cgroup2 is not mounted; mount -t cgroup2 none /sys/fs/cgroup";
            Error::Machine(hint.into())
        })
}

fn find_mount(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(path))
    })
}

/// Kills every process in the group and its subgroups, and removes them. Succeeds if the group does not exist.
pub(crate) fn destroy(group: &Path) -> Result<()> {
    if !group.exists() {
        return Ok(());
    }
    let describe = || format!("remove control group {}", group.display());
    let deadline = Instant::now() + KILL_TIMEOUT;
    loop {
        kill(group).context(describe)?;
        match remove_tree(group) {
            Ok(()) => return Ok(()),
            Err(error)
                if error.raw_os_error() != Some(nix::libc::EBUSY) || Instant::now() > deadline =>
            {
                return Err(error).context(describe);
            }
            Err(_) => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Creates a group, and the parent directory of all labs.
pub(crate) fn create(group: &Path) -> Result<()> {
    loop {
        match fs::create_dir_all(group) {
            // Another process removed the last lab, and the parent directory, in the middle of the call: try again.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            made => return made.context(|| format!("create {}", group.display())),
        }
    }
}

/// Removes the parent directory of all labs if no lab is left.
pub(crate) fn remove_base_if_empty() {
    if let Ok(base) = labs_cgroup() {
        // Fails if another lab is up, which is no error.
        let _ = fs::remove_dir(base);
    }
}

/// Returns the processes in a group, as PIDs of the caller's PID namespace.
pub(crate) fn processes(group: &Path) -> Vec<i32> {
    let listed = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    listed
        .lines()
        .filter_map(|line| line.parse().ok())
        .filter(|pid| *pid > 0)
        .collect()
}

fn kill(group: &Path) -> io::Result<()> {
    match fs::write(group.join("cgroup.kill"), "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn remove_tree(group: &Path) -> io::Result<()> {
    let children = match fs::read_dir(group) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        children => children?,
    };
    for child in children {
        let child = child?;
        if child.file_type()?.is_dir() {
            remove_tree(&child.path())?;
        }
    }
    match fs::remove_dir(group) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup2_mount_is_found_beside_version_1() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(find_mount(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(find_mount("proc /proc proc rw 0 0\n"), None);
    }
}
