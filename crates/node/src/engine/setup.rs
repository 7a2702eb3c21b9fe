//! Start-up: from the configuration to a node with attached filters and open channels.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use holdfast_bpf::Lease;
use holdfast_bpf::shared_with_c::{Event as KernelEvent, NEW_CLIENTS_SLOT};
use holdfast_daemon::exit_code::DaemonExitCode;
use holdfast_daemon::service_manager;
use holdfast_daemon::start_check::StartProblems;
use holdfast_proto::handoff::{Handoff, HandoffMachineConfig as MachineConfig};
use holdfast_proto::migration::MigrationMachineConfig as MoveConfig;
use holdfast_proto::table_rebuild::{TableRebuild, TableRebuildConfig};
use holdfast_sys::caps::{
    Capability, keep_only_capabilities, keep_only_except_bounding, missing_capabilities,
};
use holdfast_sys::net::Interface;
use holdfast_sys::priority::become_realtime;
use tokio::sync::mpsc;

use super::Engine;
use super::arrivals::ArrivingConnections;
use super::background_work::BackgroundWork;
use super::client_placement::ClientPlacement;
use super::contact_service::ContactService;
use super::deferred_requests::DeferredRequests;
use super::donations::Donations;
use super::event_loop::{EventSources, LoopEnd, Signals, run};
use super::fault_injection::{FaultInjector, fail_start_if_due, test_freeze_max};
use super::flow_history::FlowHistory;
use super::group_role::GroupRole;
use super::group_services::GroupServices;
use super::handoff_operations::HandoffOperations;
use super::holder::Holder;
use super::host_changes::HostChanges;
use super::join_wait::{wait_for_datagram_keys, wait_until_joined};
use super::network_setup::{
    HOLD_DEVICE, add_addresses, adopt_lease, configure_dataplane, deliver_private_flows,
    remove_unconfigured_addresses,
};
use super::node_load::NodeLoad;
use super::packet_hold::PacketHold;
use super::private_flows::PrivateFlows;
use super::process_flows::ProcessFlows;
use super::program_messages::ProgramMessages;
use super::programs::ConnectedPrograms;
use super::recovered_flows::RecoveredFlows;
use super::remote_drains::RemoteDrains;
use super::role_change::pinned_lease_writer;
use super::server_health::HealthMonitor;
use super::start_check::{check_before_start, find_interface};
use super::start_undo::{PinsBefore, StartUndo};
use super::statistics::Statistics;
use super::waiting_clients::WaitingClients;
use crate::app_server::AppServer;
use crate::conductor::ConductorDriver;
use crate::config::{Config, DnsConfig};
use crate::control::ControlServer;
use crate::credentials::{CredentialDriver, CredentialWorker, LoadedCredentials};
use crate::dataplane::{Dataplane, HoldDevice};
use crate::dns::{self, DnsFeed};
use crate::health::ObservationReceiver;
use crate::membership::{GroupMembership, MembershipOptions, RECEIVED_FRAMES_MAX};
use crate::metrics::Metrics;
use crate::migration::{EventReceiver, Migrations};
use crate::peer_channel::{PeerChannel, PeerChannelOptions, Peers};
use crate::reach::reach_of;
use crate::replication::ReplicationDriver;

/// Capabilities that every daemon needs: for repair mode, filters and addresses; for loading eBPF programs; and for the
/// tracing that CO-RE helpers require.
pub const CAPABILITIES: [Capability; 5] = [
    Capability::NetAdmin,
    Capability::NetRaw,
    Capability::NetBindService,
    Capability::Bpf,
    Capability::Perfmon,
];

/// Further capabilities where processes move: inspecting and controlling processes of other users, and the namespaces,
/// PIDs and users of restored processes.
pub const MIGRATION_CAPABILITIES: [Capability; 11] = [
    Capability::Chown,
    Capability::DacOverride,
    Capability::DacReadSearch,
    Capability::Fowner,
    Capability::Kill,
    Capability::Setgid,
    Capability::Setuid,
    Capability::Setpcap,
    Capability::SysPtrace,
    Capability::SysAdmin,
    Capability::CheckpointRestore,
];

/// Capabilities kept for migration if present: for raising limits and priorities of restored processes.
const MIGRATION_OPTIONAL_CAPABILITIES: [Capability; 2] =
    [Capability::SysNice, Capability::SysResource];

/// 2020-01-01 in seconds since 1970.
const YEAR_2020: u64 = 1_577_836_800;

/// Reason why the node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The daemon lacks capabilities.
    #[error(
        "holdfastd lacks {0}; run it as root, or give it these capabilities (docs/configuration.md). As a systemd \
         service with [migration], it needs the drop-in migration.conf (docs/install.md)"
    )]
    Capabilities(String),
    /// Conditions of the start are not met.
    #[error(transparent)]
    Problems(#[from] StartProblems),
    /// The kernel refused an operation.
    #[error("{what}: {source}")]
    System {
        /// The operation that was attempted.
        what: String,
        /// The error from the kernel.
        source: std::io::Error,
    },
    /// Any error with a message of its own.
    #[error(transparent)]
    Other(#[from] Box<dyn std::error::Error>),
}

impl SetupError {
    /// Returns the exit code of a daemon that ends with this error.
    pub fn exit_code(&self) -> DaemonExitCode {
        match self {
            Self::Capabilities(_) => DaemonExitCode::NoPermission,
            Self::Problems(problems) => problems.exit_code(),
            Self::Other(error) => match error.downcast_ref() {
                Some(holdfast_bpf::Error::Load(_)) => DaemonExitCode::UnsupportedKernel,
                _ => DaemonExitCode::of(error.as_ref()),
            },
            Self::System { source, .. } => DaemonExitCode::of(source),
        }
    }
}

pub(super) fn system_error(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> SetupError {
    let what = what.into();
    move |source| SetupError::System { what, source }
}

pub(super) fn other_error(error: impl std::error::Error + 'static) -> SetupError {
    SetupError::Other(Box::new(error))
}

/// Runs the node until a signal stops it. Must be called within a `LocalSet`.
///
/// # Errors
/// The node cannot start.
pub async fn run_until_signal(mut config: Config) -> Result<(), SetupError> {
    check_before_start(&config)?;
    let (boot, floor) = boot_id_and_epoch_floor();
    let mut channels = NodeChannels::open(&config, boot)?;
    let mut is_prepared = false;
    loop {
        if let Some(membership) = channels.membership.clone() {
            if membership.status().own.is_none() {
                // A service manager need not wait for the group.
                tracing::info!(node = config.node.name, "waiting for the group");
                service_manager::report_ready();
            }
            let (inputs, peers) = (&mut channels.inputs, &channels.peers);
            let credentials = &channels.credentials;
            if !wait_until_joined(&mut config, inputs, &membership, (peers, credentials)).await {
                break;
            }
            wait_for_datagram_keys(&membership, peers).await;
        }
        let mut undo = StartUndo::default();
        let (mut engine, worker_events, observations) =
            build_engine(config.clone(), &channels, (boot, floor), &mut undo)?;
        let kernel_events = Rc::new(RefCell::new(Vec::<KernelEvent>::new()));
        let sink = kernel_events.clone();
        // The reader borrows nothing from the engine, because it has its own handle of the map.
        let ring = engine
            .dataplane
            .programs
            .events(move |event| sink.borrow_mut().push(event))
            .map_err(other_error)?;
        reach_start_step("events")?;
        engine.note_connected_peers();
        engine.recover();
        engine
            .placement
            .adopt_handshake_redirects(&engine.dataplane);
        let now = engine.now();
        engine.migrations.recover(now);
        engine.run_machines();
        if !is_prepared {
            prepare_thread(&config)?;
            is_prepared = true;
        }
        // The observing threads inherit the reduced capabilities.
        engine
            .start_health()
            .map_err(system_error("observing servers"))?;
        (engine.node_load.start(&config.node.interface))
            .map_err(system_error("measuring the load"))?;
        engine
            .start_conductor()
            .map_err(system_error("listing the processes that serve"))?;
        undo.disarm();
        tracing::info!(node = config.node.name, "ready");
        service_manager::report_ready();
        let inputs = &mut channels.inputs;
        match run(
            engine,
            inputs,
            (worker_events, observations),
            ring,
            kernel_events,
        )
        .await?
        {
            LoopEnd::Stopped => break,
            LoopEnd::Renumbered => {
                tracing::warn!("this node has another number in the group: its engine begins anew");
                if let Some(group) = &mut channels.inputs.group {
                    group.repeat_settings();
                }
            }
        }
    }
    service_manager::report_stopping();
    channels.peers.shutdown();
    Ok(())
}

/// Gives the thread of the event loop its priority, and takes the capabilities that it does not need.
fn prepare_thread(config: &Config) -> Result<(), SetupError> {
    if config.node.realtime
        && let Err(error) = become_realtime()
    {
        tracing::warn!(%error, "no real-time priority: freezes are longer when this host is busy (node.realtime)");
    }
    let needed = needed_capabilities(config);
    let result = match config.migration.enabled {
        true => {
            keep_only_except_bounding(&[&needed[..], &MIGRATION_OPTIONAL_CAPABILITIES].concat())
        }
        false => keep_only_capabilities(&needed),
    };
    result.map_err(system_error("dropping capabilities"))
}

/// The daemon's channels to other nodes and to the operator, which outlive an engine.
struct NodeChannels {
    peers: Peers,
    dns: Option<Rc<DnsFeed>>,
    membership: Option<Rc<GroupMembership>>,
    credentials: Rc<CredentialWorker>,
    inputs: EventSources,
    metrics: Metrics,
}

impl NodeChannels {
    fn open(config: &Config, boot: u64) -> Result<NodeChannels, SetupError> {
        let metrics = Metrics::new();
        let loaded = LoadedCredentials::load(config).map_err(other_error)?;
        loaded.record(&metrics);
        let (credentials, credential_events) =
            CredentialWorker::start(config, &loaded, metrics.clone())
                .map_err(system_error("certificates and join tokens"))?;
        let membership_options = match config.group.self_running {
            Some(_) => Some(MembershipOptions::new(config, boot).map_err(other_error)?),
            None => None,
        };
        let (frame_sender, frames) = mpsc::channel(RECEIVED_FRAMES_MAX);
        let frame_sender = membership_options.is_some().then_some(frame_sender);
        let options = PeerChannelOptions::new(config, boot, frame_sender);
        let (peers, peer_events) =
            PeerChannel::start(options, loaded.tls, metrics.clone()).map_err(system_error(
                format!("listening on {}", config.node.address),
            ))?;
        reach_start_step("channel")?;
        let control = ControlServer::bind(config, metrics.clone())
            .map_err(system_error("the control socket"))?;
        let dns = config.dns.as_ref().map(|dns| start_dns(dns, &metrics));
        let dns = dns.transpose()?.map(Rc::new);
        let started = membership_options
            .map(|options| GroupMembership::start(options, frames, peers.clone(), metrics.clone()));
        let (membership, group) = started.transpose().map_err(other_error)?.unzip();
        if let Some(membership) = &membership {
            renew_pinned_lease(config, membership);
        }
        Ok(NodeChannels {
            peers,
            dns,
            membership: membership.map(Rc::new),
            credentials: Rc::new(credentials),
            inputs: EventSources {
                peers: peer_events,
                control,
                credential_events,
                group,
                signals: Signals::new().map_err(system_error("signals"))?,
            },
            metrics,
        })
    }
}

/// Lets the membership renew the lease of the programs that an earlier daemon left attached: to load the programs of this
/// daemon may take longer than the rest of the lease. The table of the attached programs must serve for the node's view.
fn renew_pinned_lease(config: &Config, membership: &GroupMembership) {
    match Lease::open_pinned(&config.node.bpffs) {
        Ok(Some(lease)) => membership.set_lease_writer(pinned_lease_writer(lease)),
        Ok(None) => {}
        Err(error) => {
            tracing::warn!(%error, "cannot renew the lease of the former daemon's filters: new clients may wait for this daemon");
        }
    }
}

/// Starts the DNS server.
fn start_dns(config: &DnsConfig, metrics: &Metrics) -> Result<DnsFeed, SetupError> {
    let started = dns::start(config, metrics.clone());
    let (feed, addresses) = started.map_err(system_error("answering DNS queries (dns.listen)"))?;
    tracing::info!(zone = %config.zone.origin, ?addresses, "answering DNS queries");
    Ok(feed)
}

/// Checks the daemon's capabilities before anything is changed.
///
/// # Errors
/// [`SetupError::Capabilities`] names the missing ones.
pub fn check_capabilities(config: &Config) -> Result<(), SetupError> {
    let lacking = missing_capabilities(&needed_capabilities(config))
        .map_err(system_error("reading capabilities"))?;
    if lacking.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = lacking.iter().map(ToString::to_string).collect();
    Err(SetupError::Capabilities(names.join(", ")))
}

/// Returns the capabilities that this configuration needs.
fn needed_capabilities(config: &Config) -> Vec<Capability> {
    let mut needed = CAPABILITIES.to_vec();
    if config.migration.enabled {
        needed.extend(MIGRATION_CAPABILITIES);
    }
    needed
}

/// Opens sockets and files first, since these can fail without an effect on the network.
fn build_engine(
    config: Config,
    channels: &NodeChannels,
    (boot, floor): (u64, u32),
    undo: &mut StartUndo,
) -> Result<(Engine, EventReceiver, ObservationReceiver), SetupError> {
    let interface = find_interface(&config)?;
    let group = GroupRole::new(&config);
    let (machine, move_config) = machine_configs(&config, boot, floor);
    let metrics = channels.metrics.clone();
    let credentials = CredentialDriver::new(&config, boot, &channels.credentials, &channels.peers)
        .map_err(other_error)?;
    let apps = AppServer::bind(&config.app_socket(), &config.app, &config.node.name)
        .map_err(system_error("the socket of server programs"))?;
    reach_start_step("sockets")?;
    let view = group.view().clone();
    let (migrations, worker_events) =
        Migrations::open(move_config, view.clone(), &config, metrics.clone())
            .map_err(system_error("the records of moves"))?;
    reach_start_step("moves")?;
    // Read before this daemon has pins: pins without a record are those of an earlier release.
    let mut host_changes = HostChanges::of_host(&config);
    let (dataplane, hold) = attach_dataplane(&config, &group, &interface, &mut host_changes, undo)?;
    let arrivals = ArrivingConnections::open(&config.node.run_dir, &dataplane, &hold, boot)?;
    reach_start_step("arrivals")?;
    remove_unconfigured_addresses((&config, &group), &interface, &mut host_changes)?;
    remove_unconfigured_services(&config, &dataplane)?;
    // The table of an earlier daemon has all flows, because only one node ever is the configured contact node.
    let holder = (group.is_contact()).then(|| Holder::new(&dataplane.programs, &config, floor));
    let rebuild_config = TableRebuildConfig::new(config.node.id, boot);
    let table_rebuild = TableRebuild::new(Duration::ZERO, rebuild_config, view.clone(), true);
    let (health, observations) = HealthMonitor::new(&config, group.contact());
    let conductor_view = view.clone();
    let engine = Engine {
        machine: Handoff::new(machine, view),
        operations: HandoffOperations::default(),
        donations: Donations::new().map_err(other_error)?,
        arrivals,
        recovered: RecoveredFlows::default(),
        private_flows: PrivateFlows::new(&config, migrations.addresses().clone()),
        migrations,
        process_flows: ProcessFlows::default(),
        placement: ClientPlacement::new(
            &config.services,
            reach_of(config.group.reach).has_contact_node(),
        ),
        health,
        dns: channels.dns.clone(),
        contact_reached_at: None,
        conductor: ConductorDriver::new(&config, boot, conductor_view),
        remote_drains: RemoteDrains::default(),
        node_load: NodeLoad::default(),
        group_services: GroupServices::default(),
        replication: ReplicationDriver::new(
            &config,
            interface.index,
            channels.peers.clone(),
            channels.metrics.clone(),
            group.view().clone(),
        ),
        flow_history: FlowHistory::default(),
        contact_service: ContactService::new(&config, interface, host_changes, group.is_contact()),
        waiting_clients: WaitingClients::default(),
        group,
        table_rebuild,
        holder,
        boot,
        credentials,
        epoch_floor: floor,
        deferred: DeferredRequests::default(),
        former_holder_until: None,
        peers: channels.peers.clone(),
        membership: channels.membership.clone(),
        programs: ConnectedPrograms::default(),
        program_messages: ProgramMessages::new(apps),
        statistics: Statistics::new(metrics),
        background_work: BackgroundWork::default(),
        faults: FaultInjector::new(&config.node.run_dir),
        hold: PacketHold::new(hold),
        dataplane,
        started: Instant::now(),
        config,
    };
    Ok((engine, worker_events, observations))
}

/// Returns the boot id, which distinguishes this run of the daemon from earlier ones, and the epoch at which flows
/// begin.
fn boot_id_and_epoch_floor() -> (u64, u32) {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let boot = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
    let floor = u32::try_from(now.as_secs().saturating_sub(YEAR_2020)).unwrap_or(1);
    (boot, floor)
}

/// Builds the configurations of the handoff machine and the migration machine.
fn machine_configs(config: &Config, boot: u64, floor: u32) -> (MachineConfig, MoveConfig) {
    let move_config = MoveConfig::new(config.node.id, boot);
    let mut machine = MachineConfig::new(config.node.id, boot);
    machine.new_flow_epoch_min = floor;
    machine.freeze_max = test_freeze_max().unwrap_or(machine.freeze_max);
    (machine, move_config)
}

/// Attaches filters before adding addresses, so that from the first packet on no packet of another node's flow reaches
/// the stack. Filters of an earlier daemon go on until the programs are replaced, and so does its traffic: maps that stay
/// have the new settings before, and new maps have the entries of those that they replace.
fn attach_dataplane(
    config: &Config,
    group: &GroupRole,
    interface: &Interface,
    host_changes: &mut HostChanges,
    undo: &mut StartUndo,
) -> Result<(Dataplane, HoldDevice), SetupError> {
    let pins = PinsBefore::list(&config.node.bpffs);
    undo.push("pinned maps and links", move || pins.remove_others());
    let mut dataplane = Dataplane::load(config.node.id, &config.node.bpffs, config.node.capacity)
        .map_err(other_error)?;
    reach_start_step("maps")?;
    dataplane.set_own_address(config.node.address);
    let hold = HoldDevice::new(HOLD_DEVICE).map_err(other_error)?;
    let counters = &dataplane.programs.hold_counters;
    counters.reset(NEW_CLIENTS_SLOT);
    reach_start_step("hold")?;
    let settings = dataplane.programs.back_up_settings().map_err(other_error)?;
    undo.push("settings in pinned maps", move || settings.restore());
    adopt_lease(config, group, &dataplane);
    configure_dataplane(config, group, interface, (&hold, &mut dataplane))?;
    reach_start_step("settings")?;
    dataplane
        .programs
        .attach_interface(interface.index, true)
        .map_err(other_error)?;
    reach_start_step("filters")?;
    dataplane
        .programs
        .attach_cgroup(&config.node.cgroup().map_err(other_error)?)
        .map_err(other_error)?;
    let lost = dataplane.programs.finish_carry_over();
    if lost > 0 {
        tracing::warn!(
            lost,
            "entries of a replaced map did not fit into the new one: these connections end"
        );
    }
    reach_start_step("cgroup")?;
    add_addresses((config, group), interface, host_changes, undo)?;
    reach_start_step("addresses")?;
    deliver_private_flows(config, undo)?;
    reach_start_step("routes")?;
    Ok((dataplane, hold))
}

/// Removes the maps' entries of services that the configuration lacks. Their addresses must be gone: without the entries,
/// the stack would reset connections.
fn remove_unconfigured_services(config: &Config, dataplane: &Dataplane) -> Result<(), SetupError> {
    let flows = dataplane
        .remove_unconfigured_services(&config.services)
        .map_err(other_error)?;
    if flows > 0 {
        tracing::info!(flows, "removed the connections of removed services");
    }
    Ok(())
}

/// Fails the start if a test wants that after this step.
fn reach_start_step(step: &str) -> Result<(), SetupError> {
    fail_start_if_due(step).map_err(system_error("starting"))
}
