//! Which processes this node takes.
//!
//! What a donor offers is looked at before anything is made, and what it sends is looked at again: another node is
//! believed only as far as the configuration says. What an image may have is for [`holdfast_sys::process::judge`] to say.

use std::collections::BTreeSet;
use std::path::Path;

use holdfast_sys::cgroup::Group;
use holdfast_sys::process::files::RiskyLock;
use holdfast_sys::process::files::image::Kind;
use holdfast_sys::process::image::Descriptors;
use holdfast_sys::process::judge::{Allowed, Here, Judge};
use holdfast_sys::process::procfs::Status;
use holdfast_sys::process::rights::{Identity, Rights};
use serde::{Deserialize, Serialize};

use super::places::Addresses;
use crate::config::{MigrationConfig, SocketFamily};

/// What a donor says of a process before it sends any of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Description {
    /// What it is called.
    pub(super) name: String,
    /// Whose its processes are.
    pub(super) users: BTreeSet<u32>,
    /// As who they open files.
    pub(super) identities: BTreeSet<Identity>,
    /// The programs that they run.
    pub(super) programs: BTreeSet<String>,
    /// The control group that goes along: a unit's.
    pub(super) group: Option<Group>,
    /// Exclusive locks that cannot be handed over on files that both nodes see.
    pub(super) locks: Vec<RiskyLock>,
}

impl Description {
    /// Of the tree of these processes; what has ended meanwhile is left out.
    pub(super) fn read(pids: &[i32]) -> Description {
        let mut description = Description::default();
        for pid in pids {
            if let Ok(status) = Status::read(*pid, *pid) {
                description.users.extend(status.uids);
                description.identities.insert(Identity {
                    user: status.uids[3],
                    group: status.gids[3],
                    groups: status.groups,
                });
            }
            if let Ok(program) = std::fs::read_link(format!("/proc/{pid}/exe")) {
                let program = program.to_string_lossy().into_owned();
                description.programs.insert(program);
            }
        }
        description.locks = RiskyLock::find(pids);
        description.name = pids.first().map_or_else(String::new, |root| name_of(*root));
        description
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        // Plain text and numbers: it cannot fail.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Description, String> {
        postcard::from_bytes(bytes).map_err(|error| {
            format!("its description cannot be read ({error}): run the same release on both nodes")
        })
    }
}

/// What a process is called; nothing if there is none.
pub(super) fn name_of(pid: i32) -> String {
    // Any bytes may be in it.
    let comm = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(&comm).trim_end().to_owned()
}

/// What the configuration allows.
#[derive(Debug, Clone)]
pub(super) struct Policy {
    config: MigrationConfig,
    judge: Judge,
    addresses: Addresses,
    /// What the process that comes may open.
    rights: Rights,
}

impl Policy {
    /// `ports` are those of services.
    pub(super) fn new(
        config: &MigrationConfig,
        addresses: Addresses,
        ports: impl IntoIterator<Item = u16>,
    ) -> Policy {
        let allowed = Allowed {
            users: config.users.clone(),
            groups: config.groups.clone(),
            programs: config.paths.clone(),
            ports: config.ports.iter().copied().chain(ports).collect(),
        };
        Policy {
            config: config.clone(),
            judge: Judge::new(allowed, Here::read()),
            addresses,
            rights: Rights::Of {
                whose: BTreeSet::new(),
                files: Vec::new(),
            },
        }
    }

    /// For a process that was offered so, and not refused: it may open what those of its users could. Where root's processes may
    /// come nothing is gained by asking: one of them could open everything.
    pub(super) fn of(&self, description: &Description) -> Policy {
        let rights = match self.has_root() {
            true => Rights::All,
            false => Rights::Of {
                whose: description.identities.clone(),
                files: self.config.files.clone(),
            },
        };
        Policy {
            rights,
            ..self.clone()
        }
    }

    /// What the process that comes may open.
    pub(super) fn rights(&self) -> &Rights {
        &self.rights
    }

    /// Whether root's processes may come.
    pub(super) fn has_root(&self) -> bool {
        self.config.users.contains(&0)
    }

    /// What an image may have.
    pub(super) fn judge(&self) -> &Judge {
        &self.judge
    }

    /// Whether the descriptors that were sent may come, and of sockets those of the families that are listed, at addresses of the
    /// group, and no others.
    pub(super) fn check_descriptors(&self, found: &Descriptors) -> Result<(), String> {
        self.judge.descriptors(found)?;
        let internet = |is_v6: bool| match is_v6 {
            true => SocketFamily::Ipv6,
            false => SocketFamily::Ipv4,
        };
        for file in found.files.new_ones() {
            match &file.kind {
                Kind::Unix(_) => self.family(SocketFamily::Unix)?,
                Kind::Netlink(_) => self.family(SocketFamily::Netlink)?,
                _ => {}
            }
        }
        for socket in found.sockets.values() {
            self.family(internet(socket.is_v6()))?;
        }
        self.addresses.check(found)
    }

    fn family(&self, family: SocketFamily) -> Result<(), String> {
        match self.config.families.contains(&family) {
            true => Ok(()),
            false => Err(format!(
                "it has a socket of family {family}, which is not in its list [migration] families"
            )),
        }
    }

    /// Why a process that is offered is not taken; empty if it is.
    pub(super) fn refusals(&self, description: &Description, memory: u64) -> Vec<String> {
        if !self.config.enabled {
            let text = "it takes no processes: [migration] enabled is not set in its configuration";
            return vec![text.to_owned()];
        }
        let identities = &description.identities;
        let mut users = description.users.clone();
        users.extend(identities.iter().map(|who| who.user));
        let users = users.into_iter();
        let mut refusals: Vec<String> = users
            .filter_map(|user| self.judge.user(user).err())
            .collect();
        let of_groups = |who: &Identity| {
            let groups = std::iter::once(&who.group).chain(&who.groups);
            self.judge.groups(groups).err()
        };
        refusals.extend(identities.iter().filter_map(of_groups));
        let programs = description.programs.iter();
        refusals
            .extend(programs.filter_map(|program| self.judge.program(Path::new(program)).err()));
        let group = description.group.iter();
        refusals.extend(group.filter_map(|group| self.judge.group(group).err()));
        refusals.extend(description.locks.iter().filter_map(RiskyLock::refusal));
        refusals.extend(too_large(memory));
        refusals
    }
}

/// Why there is no room.
fn too_large(memory: u64) -> Option<String> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let available: u64 = line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024;
    (memory > available).then(|| {
        let mib = |bytes: u64| bytes >> 20;
        let (needs, has) = (mib(memory), mib(available));
        format!("it needs {needs} MiB of memory, {has} MiB are available there")
    })
}

#[cfg(test)]
mod tests;
