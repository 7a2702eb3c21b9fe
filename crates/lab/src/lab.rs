//! A lab that is up.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    process::{Child, Command},
};

use crate::{
    address_plan::{AddressPlan, LabHost, SWITCH_NAME},
    bring_up, cgroup,
    error::{Error, Result},
    lab_spec::{LabSpec, ServiceReach, validate_name},
    lab_state::{self, LabLock, LabState},
    network_scripts,
};

/// A lab that is up. A lab made by [`Lab::up`] goes down when this value is dropped, unless its [`LabSpec`] says to
/// keep it; a lab found by [`Lab::open`] stays.
#[derive(Debug)]
pub struct Lab {
    pub(crate) state: LabState,
    hosts: Vec<LabHost>,
    /// The lab's processes, if dropping this value takes the lab down.
    pub(crate) owned_processes: Option<Vec<Child>>,
}

impl Lab {
    /// Brings a lab up, and returns when every host reaches its router. Hosts behind the link program are not probed,
    /// so that their sequence of losses is not consumed.
    ///
    /// # Errors
    /// [`Error::Exists`] when a lab of this name is up; [`Error::Invalid`] when the spec is invalid; [`Error::Machine`]
    /// when the machine lacks a prerequisite. After an error nothing is left.
    pub fn up(spec: &LabSpec) -> Result<Lab> {
        let started = bring_up::up(spec)?;
        let owned = (!spec.keep).then_some(started.children);
        Ok(Lab::new(started.state, owned))
    }

    /// Finds a lab that is up.
    ///
    /// # Errors
    /// [`Error::NoLab`] when no lab of this name exists, or only the remains of a killed process's lab.
    pub fn open(name: &str) -> Result<Lab> {
        let state = LabState::load(name)?;
        if !state.ready {
            return Err(Error::NoLab(name.into()));
        }
        Ok(Lab::new(state, None))
    }

    fn new(state: LabState, owned: Option<Vec<Child>>) -> Lab {
        Lab {
            hosts: state.plan.hosts(),
            state,
            owned_processes: owned,
        }
    }

    /// Returns the lab's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// Returns the lab's sizes, number, and all addresses.
    #[must_use]
    pub fn plan(&self) -> &AddressPlan {
        &self.state.plan
    }

    /// Returns the reach that the lab was made for.
    #[must_use]
    pub fn reach(&self) -> ServiceReach {
        self.state.reach
    }

    /// Returns all hosts, nodes first.
    #[must_use]
    pub fn hosts(&self) -> &[LabHost] {
        &self.hosts
    }

    /// Returns the host of this name.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn host(&self, name: &str) -> Result<&LabHost> {
        let missing = || Error::NoHost {
            lab: self.state.name.clone(),
            host: name.into(),
        };
        self.hosts
            .iter()
            .find(|host| host.name == name)
            .ok_or_else(missing)
    }

    /// Returns a command prefix that runs a program inside a host, or inside the switch `sw`: the first argument that
    /// the caller adds is the program. The process forwards signals, returns the exit code (128 plus the number for a
    /// death by signal), and kills the program when it is itself killed. Inside, `HOLDFAST_LAB`, `HOLDFAST_HOST` and
    /// `HOLDFAST_CGROUP` are set.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn command(&self, host: &str) -> Result<Command> {
        self.state.host_init(host)?;
        let mut command = Command::new(&self.state.program);
        command.args(["lab-enter", self.name(), host, "--"]);
        Ok(command)
    }

    /// Moves the calling thread into a host's network namespace permanently. The thread's mounts, and so `/sys`, stay
    /// the machine's.
    ///
    /// # Errors
    /// [`Error::NoHost`]; the system's error when the host has ended.
    pub fn enter_net_namespace(&self, host: &str) -> Result<()> {
        self.state.host_init(host)?.enter_net_namespace()
    }

    /// Runs `work` on its own thread in a host's network namespace. Sockets that `work` creates stay in that namespace
    /// on any thread.
    ///
    /// # Errors
    /// [`Error::NoHost`]; the system's error when the host has ended.
    pub fn run_in_net_namespace<T: Send>(
        &self,
        host: &str,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T> {
        self.state
            .host_init(host)?
            .run_in_net_namespace(|| Ok(work()))
    }

    /// Returns a host's addresses on `eth0`.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn address(&self, host: &str) -> Result<(Ipv4Addr, Ipv6Addr)> {
        self.host(host).map(|host| (host.v4, host.v6))
    }

    /// Returns the service address on link in segment 0; see [`AddressPlan::service_addresses`].
    #[must_use]
    pub fn service_address(&self) -> (Ipv4Addr, Ipv6Addr) {
        self.state.plan.service_addresses()
    }

    /// Returns the service address outside all segments; see [`AddressPlan::routed_service_addresses`].
    #[must_use]
    pub fn routed_service_address(&self) -> (Ipv4Addr, Ipv6Addr) {
        self.state.plan.routed_service_addresses()
    }

    /// Makes the router send packets for the routed service address to `host`.
    ///
    /// # Errors
    /// [`Error::NoHost`]; otherwise the system's error.
    pub fn route_service(&self, host: &str) -> Result<()> {
        let host = self.host(host)?;
        self.state
            .host_init(SWITCH_NAME)?
            .run_in_net_namespace(|| bring_up::route_service(&self.state.plan, host))
    }

    /// Returns the interface in the switch's network namespace that leads to a host and receives its packets.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn switch_end(&self, host: &str) -> Result<String> {
        self.host(host).map(network_scripts::switch_end)
    }

    /// Returns a host's control group, as a path on the machine. Inside the host it is `/sys/fs/cgroup`.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn cgroup(&self, host: &str) -> Result<PathBuf> {
        self.state.host_init(host)?;
        Ok(self.state.host_cgroup(host))
    }

    /// Returns the processes of a host, its init included, as PIDs of the machine.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn processes(&self, host: &str) -> Result<Vec<i32>> {
        Ok(cgroup::processes(&self.cgroup(host)?))
    }

    /// Returns the init process of a host, as a PID of the machine. Killing it kills the host.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn init_process(&self, host: &str) -> Result<i32> {
        self.state.host_init(host).map(|init| init.pid)
    }

    /// Leaves the lab up when this value is dropped. The lab still ends with the owning process, unless it was made to
    /// be kept.
    pub fn detach(mut self) {
        // Dropping a child does not end it, but its standard input must stay open while this process lives.
        std::mem::forget(self.owned_processes.take());
    }

    /// Takes the lab down: kills all its processes and removes its files.
    ///
    /// # Errors
    /// The system's error; then `prune` may succeed later.
    pub fn down(mut self) -> Result<()> {
        let children = self.owned_processes.take().unwrap_or_default();
        take_down(&self.state.name, children)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Some(children) = self.owned_processes.take() {
            // The error cannot be reported here; the next `up` or `prune` tries again.
            let _ = take_down(&self.state.name, children);
        }
    }
}

fn take_down(name: &str, mut children: Vec<Child>) -> Result<()> {
    let group = cgroup::labs_cgroup()?.join(name);
    match LabLock::lock_existing(name) {
        Ok(_lock) => bring_up::remove_all(name, &group, &mut children),
        Err(Error::NoLab(_)) if group.exists() => bring_up::remove_all(name, &group, &mut children),
        Err(error) => Err(error),
    }
}

/// Takes down a lab by its name, including the remains of a killed process's lab.
///
/// # Errors
/// [`Error::NoLab`] when nothing of this name is left; otherwise the system's error.
pub fn down(name: &str) -> Result<()> {
    validate_name(name)?;
    let done = take_down(name, Vec::new());
    lab_state::remove_root_if_empty();
    done
}

/// Returns the names of all labs, including remains of killed processes' labs, and true for each that is up.
///
/// # Errors
/// [`Error::Machine`] when cgroup2 is not mounted.
pub fn list() -> Result<Vec<(String, bool)>> {
    let mut names = lab_state::lab_names();
    let groups = std::fs::read_dir(cgroup::labs_cgroup()?)
        .into_iter()
        .flatten()
        .flatten();
    let groups = groups.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    names.extend(groups.filter_map(|entry| entry.file_name().into_string().ok()));
    names.sort();
    names.dedup();
    let is_up = |name: &String| LabState::load(name).is_ok_and(|state| state.is_alive());
    Ok(names
        .into_iter()
        .map(|name| (name.clone(), is_up(&name)))
        .collect())
}

/// Removes the labs of killed processes. Labs that are up or being brought up stay, as do labs with a live owner but a
/// dead host. Returns the names of the removed labs.
///
/// # Errors
/// The system's error for the first lab that cannot be removed.
pub fn prune() -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for (name, _) in list()? {
        let _all = LabLock::lock_root()?;
        // Another process holds the lock to bring the lab up or down: skip the lab.
        let Ok(_lock) = LabLock::lock_new(&name) else {
            continue;
        };
        if LabState::load(&name).is_ok_and(|state| state.is_in_use()) {
            continue;
        }
        bring_up::remove_all(&name, &cgroup::labs_cgroup()?.join(&name), &mut Vec::new())?;
        removed.push(name);
    }
    lab_state::remove_root_if_empty();
    Ok(removed)
}
