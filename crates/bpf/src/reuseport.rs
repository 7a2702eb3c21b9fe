//! Sockets that share an address and a port (`SO_REUSEPORT`), by means of `c/reuseport.bpf.c`: each client of UDP
//! sockets keeps its socket, and the programs by which groups select sockets are read.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libbpf_rs::libbpf_sys::{
    bpf_obj_get_info_by_fd, bpf_prog_info, bpf_prog_test_run_opts, bpf_test_run_opts,
};
use libbpf_rs::{MapCore, MapFlags, MapHandle, ObjectBuilder};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::bpf_iterator::BpfIterator;
use crate::iterator_records::read_bytes;
use crate::shared_with_c::FlowKey;
use crate::{Error, KernelMap, map_handle, program};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/reuseport.bpf.o"));

/// Maps that outlive a daemon, like the sockets in them.
const PINNED_MAPS: [&str; 2] = ["members", "clients"];
/// Most sockets with assigned clients, over all programs of a node.
const MEMBERS_MAX: u32 = 16_384;
/// Most flows that one run of the program answers for.
const QUERIES_MAX: usize = 64;
/// Packet for runs of the program: an Ethernet header.
const RUN_PACKET: [u8; 14] = [0; 14];

/// A flow, and the mark of the socket that receives its datagrams.
#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
struct SelectionQuery {
    flow: FlowKey,
    socket_mark: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
struct SelectionQueries {
    count: u32,
    pad: u32,
    entries: [SelectionQuery; QUERIES_MAX],
}

/// Selection of a group's socket for an incoming packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketSelector {
    /// Selection by the kernel, or by this crate's program.
    KernelHash,
    /// A classic program (`SO_ATTACH_REUSEPORT_CBPF`) with its instructions in the layout of `struct sock_filter`.
    ClassicBpf(Vec<u64>),
    /// A program that cannot be read.
    Unreadable,
}

/// A socket of a group, and its descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReuseportSocket {
    /// Identity of the group, for comparison only.
    pub group: u64,
    /// The socket's cookie.
    pub cookie: u64,
    /// Descriptor number.
    pub fd: u32,
    /// Index of the socket in the group, by which programs select; `None` in a group that is too large.
    pub index: Option<u32>,
    /// Selection method of the group.
    pub selector: SocketSelector,
}

/// A record of `list_reuseport`, without the instructions that follow it.
#[repr(C)]
#[derive(Clone, Copy, FromBytes)]
struct ReuseportRecord {
    group: u64,
    cookie: u64,
    tag: [u8; 8],
    fd: u32,
    index: u32,
    length: u32,
    pad: u32,
}

/// Number of sockets in a group up to which their index is known.
const GROUP_MAX: u32 = 1024;

/// Interface to the sockets of shared ports, and to the assignment of clients to them.
pub struct ReuseportGroups {
    iterator: BpfIterator,
    /// Tag of the program `select_socket`, also of an earlier daemon's.
    tag: [u8; 8],
    query_program: OwnedFd,
    select_program: OwnedFd,
    members: MapHandle,
    clients: KernelMap<FlowKey, u32>,
    marks: MapHandle,
    /// Table of queries, used by one caller at a time.
    queries: Mutex<KernelMap<u32, SelectionQueries>>,
}

impl ReuseportGroups {
    /// Loads the programs. Sockets and clients of an earlier daemon are adopted from `pins`.
    ///
    /// # Errors
    /// The kernel refuses the programs, or `pins` cannot be used.
    pub fn load(pins: &Path) -> Result<Self, Error> {
        let load_error = |e: libbpf_rs::Error| Error::Load(format!("{e:#}"));
        let mut open = ObjectBuilder::default()
            .open_memory(OBJECT)
            .map_err(load_error)?;
        for mut map in open.maps_mut() {
            let name = map.name().to_string_lossy().into_owned();
            if PINNED_MAPS.contains(&name.as_str()) {
                let pin = pins.join(format!("shared_port-{name}"));
                map.set_pin_path(pin).map_err(load_error)?;
            }
        }
        let object = open.load().map_err(load_error)?;
        let own_program = |name| {
            let program = program(&object, name)?.try_clone_to_owned();
            program.map_err(|error| Error::Load(error.to_string()))
        };
        let tag = program_tag(program(&object, "select_socket")?)?;
        Ok(Self {
            iterator: BpfIterator::from_object(
                &object,
                "list_reuseport",
                "sockets of shared ports",
            )?,
            tag,
            query_program: own_program("query_receivers")?,
            select_program: own_program("select_socket")?,
            members: map_handle(&object, "members")?,
            clients: KernelMap::new(map_handle(&object, "clients")?, "clients"),
            marks: map_handle(&object, "marks")?,
            queries: Mutex::new(KernelMap::new(
                map_handle(&object, "selection_queries")?,
                "selection_queries",
            )),
        })
    }

    /// Returns, for each flow, the index in `sockets` (UDP, in the caller's network namespace) of the socket that
    /// receives its datagrams; `None` if another socket or none does.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn query_receivers(
        &self,
        sockets: &[BorrowedFd<'_>],
        flows: &[FlowKey],
    ) -> Result<Vec<Option<usize>>, Error> {
        // The lock is held to the end, because the marks apply to this call only.
        let queries = self.queries.lock();
        let queries = queries.unwrap_or_else(PoisonError::into_inner);
        let marked = sockets.iter().zip(1_u32..).try_for_each(|(socket, mark)| {
            let key = socket.as_raw_fd().to_ne_bytes();
            let set = self.marks.update(&key, &mark.to_ne_bytes(), MapFlags::ANY);
            set.map_err(|error| map_error("marks", &error))
        });
        let answers = marked.and_then(|()| self.query_marked(&queries, sockets, flows));
        for socket in sockets {
            // Deleting a missing mark does no harm.
            let _ = self.marks.delete(&socket.as_raw_fd().to_ne_bytes());
        }
        answers
    }

    fn query_marked(
        &self,
        table: &KernelMap<u32, SelectionQueries>,
        sockets: &[BorrowedFd<'_>],
        flows: &[FlowKey],
    ) -> Result<Vec<Option<usize>>, Error> {
        let mut answers = Vec::with_capacity(flows.len());
        for chunk in flows.chunks(QUERIES_MAX) {
            let mut queries = SelectionQueries::new_zeroed();
            queries.count = u32::try_from(chunk.len()).unwrap_or(0);
            for (query, flow) in queries.entries.iter_mut().zip(chunk) {
                query.flow = *flow;
            }
            table.set(&0, &queries)?;
            self.run_query_program()?;
            let results = table.get(&0)?.unwrap_or(queries);
            let marks = results.entries[..chunk.len()]
                .iter()
                .map(|query| query.socket_mark);
            answers.extend(marks.map(|mark| (mark as usize).checked_sub(1)));
        }
        self.apply_assignments(sockets, flows, &mut answers)?;
        Ok(answers)
    }

    /// Overrides the answers for clients that were assigned to a socket by [`ReuseportGroups::name`].
    fn apply_assignments(
        &self,
        sockets: &[BorrowedFd<'_>],
        flows: &[FlowKey],
        answers: &mut [Option<usize>],
    ) -> Result<(), Error> {
        let mut indices = HashMap::new();
        for (index, socket) in sockets.iter().enumerate() {
            indices.insert(cookie(*socket)?, index);
        }
        for (flow, answer) in flows.iter().zip(answers) {
            let Some(member) = self.clients.get(flow)? else {
                continue;
            };
            let index = self
                .member_cookie(member)?
                .and_then(|cookie| indices.get(&cookie));
            *answer = index.copied().or(*answer);
        }
        Ok(())
    }

    fn run_query_program(&self) -> Result<(), Error> {
        let mut options = bpf_test_run_opts {
            sz: size_of::<bpf_test_run_opts>() as _,
            data_in: RUN_PACKET.as_ptr().cast(),
            data_size_in: RUN_PACKET.len() as u32,
            repeat: 1,
            ..bpf_test_run_opts::default()
        };
        // SAFETY: the options and the data that they point to outlive the call; the kernel only reads the packet.
        match unsafe { bpf_prog_test_run_opts(self.query_program.as_raw_fd(), &raw mut options) } {
            0 => Ok(()),
            error => Err(map_error(
                "selection_queries",
                &std::io::Error::from_raw_os_error(-error),
            )),
        }
    }

    /// Assigns the flows to a bound socket with `SO_REUSEPORT`: the socket receives their datagrams from then on. After
    /// the socket is closed, the kernel selects another.
    ///
    /// # Errors
    /// The kernel's error; too many sockets have assigned clients.
    pub fn assign(&self, socket: BorrowedFd<'_>, flows: &[FlowKey]) -> Result<(), Error> {
        if flows.is_empty() {
            return Ok(());
        }
        let member = self.register_member(socket)?;
        self.clients.set_many(flows, &vec![member; flows.len()])?;
        let choose = self.select_program.as_raw_fd();
        // SAFETY: the option's value is an `int` that outlives the call.
        let attached = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_REUSEPORT_EBPF,
                (&raw const choose).cast(),
                size_of::<i32>() as u32,
            )
        };
        match attached {
            0 => Ok(()),
            _ => Err(attach_error()),
        }
    }

    /// Returns the sockets of a process that share their ports, or may. `pid` is a number in the caller's PID
    /// namespace.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn list(&self, pid: i32) -> Result<Vec<ReuseportSocket>, Error> {
        let iter = self.iterator.over_process(pid)?;
        let bytes = read_bytes(iter).map_err(|error| self.iterator.error(error))?;
        Ok(self.parse(&bytes))
    }

    fn parse(&self, mut bytes: &[u8]) -> Vec<ReuseportSocket> {
        let mut found = Vec::new();
        while let Ok((record, rest)) = ReuseportRecord::read_from_prefix(bytes) {
            let length = record.length as usize * size_of::<u64>();
            let Some((code, rest)) = rest.split_at_checked(length) else {
                break;
            };
            bytes = rest;
            let instructions = code.chunks_exact(size_of::<u64>());
            let code = instructions.filter_map(|one| u64::read_from_bytes(one).ok());
            found.push(ReuseportSocket {
                group: record.group,
                cookie: record.cookie,
                fd: record.fd,
                index: Some(record.index).filter(|index| *index < GROUP_MAX),
                selector: match record.tag {
                    tag if tag == [0; 8] || tag == self.tag => SocketSelector::KernelHash,
                    _ if record.length > 0 => SocketSelector::ClassicBpf(code.collect()),
                    _ => SocketSelector::Unreadable,
                },
            });
        }
        found
    }

    /// Makes a socket's group select by a classic program.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn attach_classic(&self, socket: BorrowedFd<'_>, code: &[u64]) -> Result<(), Error> {
        let program = libc::sock_fprog {
            len: u16::try_from(code.len()).unwrap_or(0),
            filter: code.as_ptr().cast_mut().cast(),
        };
        // SAFETY: the option's value and the instructions that it points to outlive the call, which only reads them.
        let attached = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_REUSEPORT_CBPF,
                (&raw const program).cast(),
                size_of::<libc::sock_fprog>() as u32,
            )
        };
        match attached {
            0 => Ok(()),
            _ => Err(attach_error()),
        }
    }

    /// Registers a socket as a member, and returns its number.
    fn register_member(&self, socket: BorrowedFd<'_>) -> Result<u32, Error> {
        let cookie = cookie(socket)?;
        let first = u32::try_from(cookie % u64::from(MEMBERS_MAX)).unwrap_or(0);
        for step in 0..MEMBERS_MAX {
            let member = (first + step) % MEMBERS_MAX;
            match self.member_cookie(member)? {
                Some(other) if other == cookie => return Ok(member),
                Some(_) => {}
                None => {
                    let value = u64::from(socket.as_raw_fd().cast_unsigned()).to_ne_bytes();
                    let key = member.to_ne_bytes();
                    match self.members.update(&key, &value, MapFlags::NO_EXIST) {
                        Ok(()) => return Ok(member),
                        // Another caller took the number first.
                        Err(error) if error.kind() == libbpf_rs::ErrorKind::AlreadyExists => {}
                        Err(error) => return Err(map_error("members", &error)),
                    }
                }
            }
        }
        Err(map_error(
            "members",
            &"too many sockets have assigned clients",
        ))
    }

    /// Returns the cookie of an open member socket.
    fn member_cookie(&self, member: u32) -> Result<Option<u64>, Error> {
        let found = self.members.lookup(&member.to_ne_bytes(), MapFlags::ANY);
        let found = found.map_err(|error| map_error("members", &error))?;
        Ok(found.and_then(|bytes| u64::read_from_bytes(&bytes).ok()))
    }
}

/// Returns the kernel's digest of a program.
fn program_tag(program: BorrowedFd<'_>) -> Result<[u8; 8], Error> {
    let mut info = bpf_prog_info::default();
    let mut length = size_of::<bpf_prog_info>() as u32;
    let (fd, info_at) = (program.as_raw_fd(), (&raw mut info).cast());
    // SAFETY: the structure and its length outlive the call, and are of the length that is given.
    match unsafe { bpf_obj_get_info_by_fd(fd, info_at, &raw mut length) } {
        0 => Ok(info.tag),
        error => {
            let error = std::io::Error::from_raw_os_error(-error);
            Err(Error::Load(format!(
                "cannot query program select_socket: {error}"
            )))
        }
    }
}

fn attach_error() -> Error {
    Error::Attach {
        what: "the socket selector of a shared port".into(),
        source: std::io::Error::last_os_error(),
    }
}

/// Returns a socket's cookie.
///
/// # Errors
/// The kernel's error.
pub fn cookie(socket: BorrowedFd<'_>) -> Result<u64, Error> {
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as u32;
    // SAFETY: the value and its length outlive the call, and are of the length that is given.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    match result {
        0 => Ok(cookie),
        _ => Err(map_error("members", &std::io::Error::last_os_error())),
    }
}

fn map_error(name: &'static str, reason: &dyn std::fmt::Display) -> Error {
    Error::Map {
        name,
        reason: reason.to_string(),
    }
}
