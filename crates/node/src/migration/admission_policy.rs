//! Admission policy: the processes that this node takes.
//!
//! A donor's offer is judged before anything is made, and its messages are judged again: another node is trusted only
//! as far as the configuration says. [`holdfast_checkpoint::image_judge`] decides about the contents of an image.

use std::collections::BTreeSet;
use std::path::Path;

use holdfast_checkpoint::file_rights::{FileRights, UserIdentity};
use holdfast_checkpoint::files::RiskyLock;
use holdfast_checkpoint::files::image::OpenFileKind;
use holdfast_checkpoint::image::DescriptorUpdate;
use holdfast_checkpoint::image_judge::{ImageJudge, ImagePolicy, NodeLimits};
use holdfast_checkpoint::procfs::ProcStatus;
use holdfast_sys::cgroup::ControlGroup;
use holdfast_wire::failure::{Failure, OperatorFault, ProgramFault, ProtocolViolation, Text};
use serde::{Deserialize, Serialize};

use super::socket_endpoints::MovableAddresses;
use crate::config::{MigrationConfig, SocketFamily};

/// A donor's description of a process, sent with the offer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessDescription {
    /// Name of the process.
    pub(super) name: String,
    /// Users of its processes.
    pub(super) users: BTreeSet<u32>,
    /// Identities with which the processes open files.
    pub(super) identities: BTreeSet<UserIdentity>,
    /// Programs that the processes run.
    pub(super) programs: BTreeSet<String>,
    /// Control group that moves with the process, if it is a unit's.
    pub(super) group: Option<ControlGroup>,
    /// Exclusive locks on shared files that cannot be handed over.
    pub(super) risky_locks: Vec<RiskyLock>,
}

impl ProcessDescription {
    /// Describes the tree of these processes, without processes that have ended.
    pub(super) fn read(pids: &[i32]) -> ProcessDescription {
        let mut description = ProcessDescription::default();
        for pid in pids {
            if let Ok(status) = ProcStatus::read(*pid, *pid) {
                description.users.extend(status.uids);
                description.identities.insert(UserIdentity {
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
        description.risky_locks = RiskyLock::find(pids);
        description.name = pids
            .first()
            .map_or_else(String::new, |root| process_name(*root));
        description
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        // Encoding plain text and numbers cannot fail.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<ProcessDescription, Failure> {
        postcard::from_bytes(bytes)
            .map_err(|error| ProtocolViolation::DescriptionUnreadable(Text::of(error)).into())
    }
}

/// Returns the name of a process; empty if the process does not exist.
pub(super) fn process_name(pid: i32) -> String {
    // The name may contain any bytes.
    let comm = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(&comm).trim_end().to_owned()
}

/// Rights that the configuration grants.
#[derive(Debug, Clone)]
pub(super) struct AdmissionPolicy {
    config: MigrationConfig,
    judge: ImageJudge,
    addresses: MovableAddresses,
    /// Files that the restored process may open.
    rights: FileRights,
}

impl AdmissionPolicy {
    /// Creates the policy; `ports` are the ports of the services.
    pub(super) fn new(
        config: &MigrationConfig,
        addresses: MovableAddresses,
        ports: impl IntoIterator<Item = u16>,
    ) -> AdmissionPolicy {
        let allowed = ImagePolicy {
            users: config.users.clone(),
            groups: config.groups.clone(),
            programs: config.paths.clone(),
            ports: config.ports.iter().copied().chain(ports).collect(),
        };
        AdmissionPolicy {
            config: config.clone(),
            judge: ImageJudge::new(allowed, NodeLimits::read()),
            addresses,
            rights: FileRights::Limited {
                identities: BTreeSet::new(),
                directories: Vec::new(),
            },
        }
    }

    /// Returns the policy with other ports of services.
    pub(super) fn with_service_ports(
        &self,
        ports: impl IntoIterator<Item = u16>,
    ) -> AdmissionPolicy {
        AdmissionPolicy::new(&self.config, self.addresses.clone(), ports)
    }

    /// Returns the policy for an accepted offer: the process may open the files that its users could open. If processes
    /// of root are allowed, every file may be opened, because such a process could open every file anyway.
    pub(super) fn for_process(&self, description: &ProcessDescription) -> AdmissionPolicy {
        let rights = match self.has_root() {
            true => FileRights::Root,
            false => FileRights::Limited {
                identities: description.identities.clone(),
                directories: self.config.files.clone(),
            },
        };
        AdmissionPolicy {
            rights,
            ..self.clone()
        }
    }

    /// Returns the files that the restored process may open.
    pub(super) fn rights(&self) -> &FileRights {
        &self.rights
    }

    /// Returns true if processes of root are allowed.
    pub(super) fn has_root(&self) -> bool {
        self.config.users.contains(&0)
    }

    /// Returns the judge of image contents.
    pub(super) fn judge(&self) -> &ImageJudge {
        &self.judge
    }

    /// Checks received descriptors: sockets must be of the configured families and have addresses that can move.
    pub(super) fn check_descriptors(&self, found: &DescriptorUpdate) -> Result<(), Failure> {
        self.judge.check_descriptors(found).map_err(not_allowed)?;
        let ip_family = |is_v6: bool| match is_v6 {
            true => SocketFamily::Ipv6,
            false => SocketFamily::Ipv4,
        };
        for file in found.files.new_files() {
            match &file.kind {
                OpenFileKind::Unix(_) => self.check_family(SocketFamily::Unix)?,
                OpenFileKind::Netlink(_) => self.check_family(SocketFamily::Netlink)?,
                _ => {}
            }
        }
        for socket in found.sockets.values() {
            self.check_family(ip_family(socket.is_v6()))?;
        }
        self.addresses.check_descriptors(found)
    }

    fn check_family(&self, family: SocketFamily) -> Result<(), Failure> {
        match self.config.families.contains(&family) {
            true => Ok(()),
            false => Err(OperatorFault::FamilyNotAllowed(Text::of(family)).into()),
        }
    }

    /// Returns the reasons for refusing an offered process; empty if it is accepted.
    pub(super) fn refusals(&self, description: &ProcessDescription, memory: u64) -> Vec<Failure> {
        if !self.config.enabled {
            return vec![OperatorFault::MigrationDisabled.into()];
        }
        let identities = &description.identities;
        let mut users = description.users.clone();
        users.extend(identities.iter().map(|identity| identity.user));
        let users = users.into_iter();
        let mut refusals: Vec<Failure> = users
            .filter_map(|user| self.judge.check_user(user).err())
            .map(not_allowed)
            .collect();
        let group_refusal = |identity: &UserIdentity| {
            let groups = std::iter::once(&identity.group).chain(&identity.groups);
            self.judge.check_groups(groups).err()
        };
        refusals.extend(identities.iter().filter_map(group_refusal).map(not_allowed));
        let programs = description.programs.iter();
        let programs =
            programs.filter_map(|program| self.judge.check_program(Path::new(program)).err());
        refusals.extend(programs.map(not_allowed));
        let groups = description.group.iter();
        let groups = groups.filter_map(|group| self.judge.check_control_group(group).err());
        refusals.extend(groups.map(not_allowed));
        let risky_locks = description.risky_locks.iter();
        let risky_locks = risky_locks.filter_map(RiskyLock::refusal);
        refusals.extend(risky_locks.map(|why| ProgramFault::RiskyLock(why.into()).into()));
        refusals.extend(memory_refusal(memory));
        refusals
    }
}

/// Returns the failure for the judge's refusal of a part of a process image.
pub(super) fn not_allowed(why: String) -> Failure {
    OperatorFault::NotAllowed(why.into()).into()
}

/// Returns the reason for a refusal if the host lacks the memory.
fn memory_refusal(memory: u64) -> Option<Failure> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let available: u64 = line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024;
    (memory > available).then(|| {
        let mib = |bytes: u64| bytes >> 20;
        let (needed_mib, available_mib) = (mib(memory), mib(available));
        OperatorFault::TooLittleMemory {
            needed_mib,
            available_mib,
        }
        .into()
    })
}

#[cfg(test)]
mod tests;
