//! A lab that is up.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    process::{Child, Command},
};

use crate::{
    cgroup,
    error::{Error, Result},
    plan::{Host, Plan, SWITCH},
    spec::{Reach, Spec, check_name},
    state::{self, Lock, State},
    up, wiring,
};

/// A lab that is up. One made by [`Lab::up`] goes down when it is dropped, unless its [`Spec`] says to keep it; one found
/// by [`Lab::open`] stays.
#[derive(Debug)]
pub struct Lab {
    pub(crate) state: State,
    hosts: Vec<Host>,
    /// The processes it is made of, if this is whose drop takes it down.
    owned: Option<Vec<Child>>,
}

impl Lab {
    /// Brings a lab up, and returns when every host reaches its router. Hosts behind the link program are not tried, so
    /// as not to use up a part of its sequence of losses.
    ///
    /// # Errors
    /// [`Error::Exists`] when a lab of this name is up; [`Error::Invalid`] when the spec cannot be met; [`Error::Machine`] when the
    /// machine lacks something. After an error nothing is left.
    pub fn up(spec: &Spec) -> Result<Lab> {
        let raised = up::up(spec)?;
        let owned = (!spec.keep).then_some(raised.children);
        Ok(Lab::new(raised.state, owned))
    }

    /// Finds a lab that is up.
    ///
    /// # Errors
    /// [`Error::NoLab`] when there is none of this name, or only what a killed process left of one.
    pub fn open(name: &str) -> Result<Lab> {
        let state = State::load(name)?;
        if !state.ready {
            return Err(Error::NoLab(name.into()));
        }
        Ok(Lab::new(state, None))
    }

    fn new(state: State, owned: Option<Vec<Child>>) -> Lab {
        Lab {
            hosts: state.plan.hosts(),
            state,
            owned,
        }
    }

    /// The lab's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// Sizes, number, and all addresses.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.state.plan
    }

    /// The reach it was made for.
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.state.reach
    }

    /// All hosts, nodes first.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// A host by its name.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn host(&self, name: &str) -> Result<&Host> {
        let missing = || Error::NoHost {
            lab: self.state.name.clone(),
            host: name.into(),
        };
        self.hosts
            .iter()
            .find(|host| host.name == name)
            .ok_or_else(missing)
    }

    /// A command that runs what is appended to it inside a host, or inside the switch `sw`: the first argument added is the
    /// program. It passes signals on, gives back the exit code (128 and the number for a death by signal), and kills the program when it is itself
    /// killed. Inside, `HOLDFAST_LAB`, `HOLDFAST_HOST` and `HOLDFAST_CGROUP` are set.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn command(&self, host: &str) -> Result<Command> {
        self.state.init(host)?;
        let mut command = Command::new(&self.state.program);
        command.args(["lab-enter", self.name(), host, "--"]);
        Ok(command)
    }

    /// Moves the calling thread into a host's network namespace, for good. Its mounts, and so `/sys`, stay the machine's.
    ///
    /// # Errors
    /// [`Error::NoHost`]; what the system answers when the host is gone.
    pub fn enter_net(&self, host: &str) -> Result<()> {
        self.state.init(host)?.enter_net()
    }

    /// Runs `work` on a thread of its own in a host's network namespace. Sockets it makes stay in that namespace wherever they
    /// are used.
    ///
    /// # Errors
    /// [`Error::NoHost`]; what the system answers when the host is gone.
    pub fn in_net<T: Send>(&self, host: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.state.init(host)?.in_net(|| Ok(work()))
    }

    /// A host's addresses on `eth0`.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn address(&self, host: &str) -> Result<(Ipv4Addr, Ipv6Addr)> {
        self.host(host).map(|host| (host.v4, host.v6))
    }

    /// The service address on link in segment 0; see [`Plan::service`].
    #[must_use]
    pub fn service_address(&self) -> (Ipv4Addr, Ipv6Addr) {
        self.state.plan.service()
    }

    /// The service address on no segment; see [`Plan::routed_service`].
    #[must_use]
    pub fn routed_service_address(&self) -> (Ipv4Addr, Ipv6Addr) {
        self.state.plan.routed_service()
    }

    /// Makes the router send what is for the routed service address to `host`.
    ///
    /// # Errors
    /// [`Error::NoHost`]; otherwise what the system answers.
    pub fn route_service(&self, host: &str) -> Result<()> {
        let host = self.host(host)?;
        self.state
            .init(SWITCH)?
            .in_net(|| up::route_service(&self.state.plan, host))
    }

    /// The interface that leads to a host, in the switch's network namespace: what the host sends comes in here.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn far_end(&self, host: &str) -> Result<String> {
        self.host(host).map(wiring::near)
    }

    /// A host's control group, as a path on the machine. Inside the host it is `/sys/fs/cgroup`.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn cgroup(&self, host: &str) -> Result<PathBuf> {
        self.state.init(host)?;
        Ok(self.state.host_cgroup(host))
    }

    /// The processes of a host, its init included, by the ids that the machine knows.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn processes(&self, host: &str) -> Result<Vec<i32>> {
        Ok(cgroup::processes(&self.cgroup(host)?))
    }

    /// The init process of a host, by the id that the machine knows. Killing it kills the host.
    ///
    /// # Errors
    /// [`Error::NoHost`].
    pub fn init_process(&self, host: &str) -> Result<i32> {
        self.state.init(host).map(|init| init.pid)
    }

    /// Leaves the lab up when this value is dropped. It still ends with the owning process, unless it was made to be kept.
    pub fn leave_up(mut self) {
        // Dropping a child does not end it, but its standard input must stay open as long as this process lives.
        std::mem::forget(self.owned.take());
    }

    /// Takes the lab down: kills all its processes and removes all there is of it.
    ///
    /// # Errors
    /// What the system answers; then `prune` may succeed later.
    pub fn down(mut self) -> Result<()> {
        let children = self.owned.take().unwrap_or_default();
        take_down(&self.state.name, children)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Some(children) = self.owned.take() {
            // No one is left to tell; the next `up` or `prune` tries again.
            let _ = take_down(&self.state.name, children);
        }
    }
}

fn take_down(name: &str, mut children: Vec<Child>) -> Result<()> {
    let group = cgroup::base()?.join(name);
    match Lock::existing(name) {
        Ok(_lock) => up::remove_all(name, &group, &mut children),
        Err(Error::NoLab(_)) if group.exists() => up::remove_all(name, &group, &mut children),
        Err(error) => Err(error),
    }
}

/// Takes down a lab by its name, also one of which a killed process left only a part.
///
/// # Errors
/// [`Error::NoLab`] when nothing of this name is left; otherwise what the system answers.
pub fn down(name: &str) -> Result<()> {
    check_name(name)?;
    let done = take_down(name, Vec::new());
    state::remove_root_if_empty();
    done
}

/// The names of all labs, also of those of which a killed process left only a part, and whether they are up.
///
/// # Errors
/// [`Error::Machine`] when cgroup2 is not mounted.
pub fn list() -> Result<Vec<(String, bool)>> {
    let mut names = state::names();
    let groups = std::fs::read_dir(cgroup::base()?)
        .into_iter()
        .flatten()
        .flatten();
    let groups = groups.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    names.extend(groups.filter_map(|entry| entry.file_name().into_string().ok()));
    names.sort();
    names.dedup();
    let up = |name: &String| State::load(name).is_ok_and(|state| state.alive());
    Ok(names
        .into_iter()
        .map(|name| (name.clone(), up(&name)))
        .collect())
}

/// Removes what killed processes left of their labs. Labs that are up or being brought up stay, and those whose owner lives though a
/// host does not. The names of those removed.
///
/// # Errors
/// What the system answers for the first that cannot be removed.
pub fn prune() -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for (name, _) in list()? {
        let _all = Lock::all()?;
        // Held by someone who is bringing it up or down: not for us.
        let Ok(_lock) = Lock::create(&name) else {
            continue;
        };
        if State::load(&name).is_ok_and(|state| state.wanted()) {
            continue;
        }
        up::remove_all(&name, &cgroup::base()?.join(&name), &mut Vec::new())?;
        removed.push(name);
    }
    state::remove_root_if_empty();
    Ok(removed)
}
