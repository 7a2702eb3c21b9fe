//! The replicator's data plane (`c/replicate.bpf.c`): a client's packets go to the primary and as clones to the replicas, the
//! primary's output to the client; the replicas' output is absorbed and compared. [`Replicator`] gives the daemon access to the maps
//! and carries out its commands. Programs and maps are pinned, so that traffic continues without the daemon.
//!
//! Legs answer by way of the contact node: the route of a leg's node to the clients leads there.

pub mod shared_with_c;
pub mod watch;

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use libbpf_rs::libbpf_sys::{bpf_prog_test_run_opts, bpf_test_run_opts};
use libbpf_rs::{MapCore, MapFlags, Object, ObjectBuilder, RingBufferBuilder};
use zerocopy::{FromBytes, IntoBytes};

use crate::link::{self, Hook};
use crate::mapped_array::MappedArray;
use crate::{Error, EventReader, KernelMap, load_error, map_handle, program};
use shared_with_c::{
    Connection, ConnectionKey, Endpoint, HalfOpen, LegRef, LegRoles, MAX_REPLICATED_SERVICES,
    REPLICATION_COUNTER_NAMES, ROLES_OWN, ReplicatedService, ReplicationEvent, TestRunFrame,
};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/replicate.bpf.o"));

/// Maps that outlive a daemon.
const PINNED_MAPS: [&str; 7] = [
    "repl_services",
    "repl_legs",
    "repl_config",
    "repl_roles",
    "repl_half_open",
    "repl_connections",
    "repl_counters",
];

/// The loaded replicator.
pub struct Replicator {
    object: Object,
    pins: PathBuf,
    links: Vec<OwnedFd>,
    services: KernelMap<Endpoint, u32>,
    legs: KernelMap<Endpoint, LegRef>,
    config: KernelMap<u32, ReplicatedService>,
    roles: MappedArray<AtomicU64>,
    /// Connections whose clients have not completed the handshake. The oldest ones give way to new ones.
    pub half_open: KernelMap<ConnectionKey, HalfOpen>,
    /// Connections.
    pub connections: KernelMap<ConnectionKey, Connection>,
}

impl Replicator {
    /// Loads the programs; maps that an earlier daemon pinned below `pins` are adopted with their contents.
    ///
    /// # Errors
    /// The kernel refuses the programs, or `pins` cannot be used.
    pub fn load(pins: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(pins).map_err(|source| Error::Pin {
            path: pins.to_owned(),
            source,
        })?;
        let mut open = ObjectBuilder::default()
            .open_memory(OBJECT)
            .map_err(load_error)?;
        for mut map in open.maps_mut() {
            let name = map.name().to_string_lossy().into_owned();
            if PINNED_MAPS.contains(&name.as_str()) {
                map.set_pin_path(pins.join(&name)).map_err(load_error)?;
            }
        }
        let object = open.load().map_err(load_error)?;
        let table = |name| map_handle(&object, name);
        Ok(Self {
            services: KernelMap::new(table("repl_services")?, "repl_services"),
            legs: KernelMap::new(table("repl_legs")?, "repl_legs"),
            config: KernelMap::new(table("repl_config")?, "repl_config"),
            roles: MappedArray::map(&table("repl_roles")?, "repl_roles")?,
            half_open: KernelMap::new(table("repl_half_open")?, "repl_half_open"),
            connections: KernelMap::new(table("repl_connections")?, "repl_connections"),
            object,
            pins: pins.to_owned(),
            links: Vec::new(),
        })
    }

    /// Attaches the replicator to an interface of the caller's network namespace at which packets of clients or legs arrive, before the
    /// ownership filter. A pinned link is adopted.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn attach_interface(&mut self, ifindex: u32) -> Result<(), Error> {
        let pin = self.pins.join(format!("link-replicate_ingress-{ifindex}"));
        let ingress = program(&self.object, "replicate_ingress")?;
        let link = link::attach(ingress, Hook::FirstIngress(ifindex), &pin)?;
        self.links.push(link);
        Ok(())
    }

    /// Sets a service; the legs that it had before are replaced. Its roles stay.
    ///
    /// # Errors
    /// A table is full, or the kernel refuses.
    ///
    /// # Panics
    /// Panics if `index` is not less than [`MAX_REPLICATED_SERVICES`].
    pub fn set_service(&self, index: u16, service: &ReplicatedService) -> Result<(), Error> {
        assert!(
            usize::from(index) < MAX_REPLICATED_SERVICES,
            "service {index}"
        );
        self.remove_endpoints(index)?;
        self.config.set(&u32::from(index), service)?;
        for (leg, path) in (0u8..).zip(&service.legs) {
            if path.endpoint != Endpoint::default() {
                let leg_ref = LegRef {
                    service: index,
                    leg,
                    pad: 0,
                };
                self.legs.set(&path.endpoint, &leg_ref)?;
            }
        }
        self.services.set(&service.endpoint, &u32::from(index))
    }

    /// Removes a service with its roles. Its connections stay in the table, and their packets are dropped.
    ///
    /// # Errors
    /// The kernel's error.
    ///
    /// # Panics
    /// Panics if `index` is not less than [`MAX_REPLICATED_SERVICES`].
    pub fn remove_service(&self, index: u16) -> Result<(), Error> {
        self.remove_endpoints(index)?;
        self.set_roles(index, LegRoles::default());
        self.config
            .set(&u32::from(index), &ReplicatedService::default())
    }

    fn remove_endpoints(&self, index: u16) -> Result<(), Error> {
        let services = self.services.entries();
        let services = services.iter().filter(|(_, i)| *i == u32::from(index));
        self.services
            .remove_many(&services.map(|(endpoint, _)| *endpoint).collect::<Vec<_>>())?;
        let legs = self.legs.entries();
        let legs = legs.iter().filter(|(_, leg)| leg.service == index);
        self.legs
            .remove_many(&legs.map(|(endpoint, _)| *endpoint).collect::<Vec<_>>())
    }

    /// Sets the roles of all connections of a service that have no roles of their own, with one write.
    ///
    /// # Panics
    /// Panics if `service` is not less than [`MAX_REPLICATED_SERVICES`].
    pub fn set_roles(&self, service: u16, roles: LegRoles) {
        let word = self.roles.value_ptr(usize::from(service));
        // SAFETY: the pointer is valid for the mapping's life; programs only read the value.
        unsafe { word.as_ref() }.store(u64::from(roles.to_raw()), Ordering::SeqCst);
    }

    /// Returns the roles of a service.
    ///
    /// # Panics
    /// Panics if `service` is not less than [`MAX_REPLICATED_SERVICES`].
    #[must_use]
    pub fn roles(&self, service: u16) -> LegRoles {
        let word = self.roles.value_ptr(usize::from(service));
        // SAFETY: the pointer is valid for the mapping's life; programs only read the value.
        let word = unsafe { word.as_ref() }.load(Ordering::SeqCst);
        LegRoles::of_service(word as u32)
    }

    /// Returns all services that are set, with their indices.
    #[must_use]
    pub fn services(&self) -> Vec<(u16, ReplicatedService)> {
        let indices = self.services.entries().into_iter().map(|(_, index)| index);
        let service = |index: u32| {
            let service = self.config.get(&index).ok()??;
            Some((u16::try_from(index).ok()?, service))
        };
        indices.filter_map(service).collect()
    }

    /// Gives a connection roles of its own, or with `None` its service's roles. Returns false if there is no such connection.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_connection_roles(
        &self,
        key: ConnectionKey,
        roles: Option<LegRoles>,
    ) -> Result<bool, Error> {
        let word = roles.map_or(0, |roles| roles.to_raw() | ROLES_OWN);
        self.command("replicate_set_roles", key, word)
    }

    /// Lets a client see the answer to its handshake. Returns false if no handshake of the client was answered.
    ///
    /// Segments leave by the interfaces of the caller's network namespace, as for the other commands.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn show_syn_ack(&self, key: ConnectionKey) -> Result<bool, Error> {
        self.command("replicate_show_syn_ack", key, 0)
    }

    /// Sends the window updates and acknowledgements that follow from new roles. Returns false if there is no such connection.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn send_window_update(&self, key: ConnectionKey) -> Result<bool, Error> {
        self.command("replicate_send_window_update", key, 0)
    }

    /// Resets a client and the legs of its connection, and forgets the connection. Returns false if there is no such connection.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn reset_client(&self, key: ConnectionKey) -> Result<bool, Error> {
        self.command("replicate_reset_client", key, 0)
    }

    /// Forgets a connection. Returns false if there is no such connection.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn forget(&self, key: ConnectionKey) -> Result<bool, Error> {
        self.command("replicate_forget", key, 0)
    }

    /// Runs a program with a command in its frame; returns true if the program returns 0.
    fn command(&self, name: &str, key: ConnectionKey, argument: u32) -> Result<bool, Error> {
        let frame = TestRunFrame::new(key, argument);
        Ok(self.run(name, frame.as_bytes(), 0)?.code == 0)
    }

    /// Runs a program with a frame that seems to come from an interface of the caller's network namespace, or with 0 from loopback.
    /// Clones that the program sends are really sent; the last packet, which it returns with a redirect, is not.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn run(&self, name: &str, frame: &[u8], ifindex: u32) -> Result<Outcome, Error> {
        let mut context = [0u8; SKB_CONTEXT_BYTES];
        context[SKB_IFINDEX_AT..SKB_IFINDEX_AT + 4].copy_from_slice(&ifindex.to_ne_bytes());
        let mut output = vec![0u8; frame.len() + OUTPUT_ROOM];
        let mut options = bpf_test_run_opts {
            sz: size_of::<bpf_test_run_opts>() as _,
            data_in: frame.as_ptr().cast(),
            data_size_in: u32::try_from(frame.len()).unwrap_or(u32::MAX),
            data_out: output.as_mut_ptr().cast(),
            data_size_out: u32::try_from(output.len()).unwrap_or(u32::MAX),
            ctx_in: context.as_ptr().cast(),
            ctx_size_in: SKB_CONTEXT_BYTES as u32,
            repeat: 1,
            ..bpf_test_run_opts::default()
        };
        let program = program(&self.object, name)?;
        // SAFETY: the options and the buffers that they point to outlive the call, and have the stated lengths.
        match unsafe { bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) } {
            0 => {
                output.truncate(options.data_size_out as usize);
                Ok(Outcome {
                    code: options.retval.cast_signed(),
                    frame: output,
                })
            }
            error => Err(Error::Load(format!(
                "cannot run {name}: {}",
                std::io::Error::from_raw_os_error(-error)
            ))),
        }
    }

    /// Returns every counter's name and its sum over all processors.
    #[must_use]
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let Ok(map) = map_handle(&self.object, "repl_counters") else {
            return Vec::new();
        };
        let sum = |index: u32| -> u64 {
            let found = map.lookup_percpu(index.as_bytes(), MapFlags::ANY);
            let found = found.ok().flatten().unwrap_or_default();
            let values = found.iter().filter_map(|b| u64::read_from_bytes(b).ok());
            values.sum()
        };
        (0u32..)
            .zip(REPLICATION_COUNTER_NAMES)
            .map(|(index, name)| (name, sum(index)))
            .collect()
    }

    /// Makes a reader of the data plane's events; [`EventReader::consume`] calls `handle_event` for each.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn events<'a>(
        &self,
        mut handle_event: impl FnMut(ReplicationEvent) + 'a,
    ) -> Result<EventReader<'a>, Error> {
        let map = map_handle(&self.object, "repl_events")?;
        let mut builder = RingBufferBuilder::new();
        let map_error = |e: libbpf_rs::Error| Error::Map {
            name: "repl_events",
            reason: e.to_string(),
        };
        builder
            .add(&map, move |bytes| {
                if let Ok((event, _)) = ReplicationEvent::read_from_prefix(bytes) {
                    handle_event(event);
                }
                0
            })
            .map_err(map_error)?;
        Ok(EventReader {
            ring: builder.build().map_err(map_error)?,
        })
    }

    /// Detaches the programs and removes the pins: all connections are given up.
    pub fn detach(self) {
        drop(self.links);
        let _ = std::fs::remove_dir_all(&self.pins);
    }
}

/// Result of a program's run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The program's return value: for `replicate_ingress` a `TC_ACT_` value.
    pub code: i32,
    /// The frame after the run.
    pub frame: Vec<u8>,
}

/// Returns the time of `CLOCK_MONOTONIC`, in which the programs measure.
#[must_use]
pub fn monotonic_now() -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes one `timespec`; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Size of `struct __sk_buff` up to the end of the field `hwtstamp`, bytes.
const SKB_CONTEXT_BYTES: usize = 192;
/// Offset of `struct __sk_buff::ifindex`, bytes.
const SKB_IFINDEX_AT: usize = 40;
/// Room for headers that a program adds, bytes.
const OUTPUT_ROOM: usize = 256;
