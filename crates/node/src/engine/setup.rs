//! Start-up: from the configuration to a node with attached filters and open channels.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use holdfast_bpf::shared_with_c::Event as KernelEvent;
use holdfast_daemon::exit_code::DaemonExitCode;
use holdfast_daemon::service_manager;
use holdfast_daemon::tls::Tls;
use holdfast_proto::handoff::{Handoff, HandoffMachineConfig as MachineConfig};
use holdfast_proto::migration::MigrationMachineConfig as MoveConfig;
use holdfast_proto::view::View;
use holdfast_sys::caps::{
    Capability, keep_only_capabilities, keep_only_except_bounding, missing_capabilities,
};
use holdfast_sys::net::Interface;
use holdfast_sys::priority::become_realtime;

use super::Engine;
use super::arrivals::Arrivals;
use super::background_work::BackgroundWork;
use super::client_placement::ClientPlacement;
use super::donations::Donations;
use super::event_loop::{EventSources, run};
use super::fault_injection::{FaultInjector, test_freeze_max};
use super::flow_history::FlowHistory;
use super::handoff_operations::HandoffOperations;
use super::holder::Holder;
use super::network_setup::{
    HOLD_DEVICE, add_addresses, configure_dataplane, deliver_private_flows,
};
use super::packet_hold::PacketHold;
use super::private_flows::PrivateFlows;
use super::process_flows::ProcessFlows;
use super::program_messages::ProgramMessages;
use super::programs::ConnectedPrograms;
use super::recovered_flows::RecoveredFlows;
use super::statistics::Statistics;
use crate::app_server::AppServer;
use crate::config::Config;
use crate::control::ControlServer;
use crate::dataplane::{Dataplane, HoldDevice};
use crate::metrics::Metrics;
use crate::migration::Migrations;
use crate::peer_channel::{PeerChannel, PeerChannelOptions};

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
pub async fn run_until_signal(config: Config) -> Result<(), SetupError> {
    let (mut engine, inputs) = build_engine(config)?;
    engine.recover();
    engine.placement.end_handshake_redirects(&engine.dataplane);
    let now = engine.now();
    engine.migrations.recover(now);
    engine.run_machines();
    if engine.config.node.realtime
        && let Err(error) = become_realtime()
    {
        tracing::warn!(%error, "no real-time priority: freezes are longer when this host is busy (node.realtime)");
    }
    let needed = needed_capabilities(&engine.config);
    let result = match engine.config.migration.enabled {
        true => {
            keep_only_except_bounding(&[&needed[..], &MIGRATION_OPTIONAL_CAPABILITIES].concat())
        }
        false => keep_only_capabilities(&needed),
    };
    result.map_err(system_error("dropping capabilities"))?;
    let kernel_events = std::rc::Rc::new(std::cell::RefCell::new(Vec::<KernelEvent>::new()));
    let sink = kernel_events.clone();
    // The reader borrows nothing from the engine, because it has its own handle of the map.
    let ring = engine
        .dataplane
        .programs
        .events(move |event| sink.borrow_mut().push(event))
        .map_err(other_error)?;
    tracing::info!(node = engine.config.node.name, "ready");
    service_manager::report_ready();
    run(engine, inputs, ring, kernel_events).await
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

fn build_engine(config: Config) -> Result<(Engine, EventSources), SetupError> {
    let interface = Interface::find(&config.node.interface).map_err(system_error(format!(
        "interface {} (node.interface)",
        config.node.interface
    )))?;
    let (dataplane, hold) = attach_dataplane(&config, &interface)?;
    let (boot, floor) = boot_id_and_epoch_floor();
    let (machine, move_config) = machine_configs(&config, boot, floor);
    let metrics = Metrics::new();
    let tls = Tls::from_files(&config.tls, &config.node.name).map_err(other_error)?;
    metrics.set_certificate_end(tls.end());
    let (peers, peer_events) =
        PeerChannel::start(PeerChannelOptions::new(&config, boot), tls, metrics.clone()).map_err(
            system_error(format!("listening on {}", config.node.address)),
        )?;
    let apps = AppServer::bind(&config.app_socket(), &config.app, &config.node.name)
        .map_err(system_error("the socket of server programs"))?;
    let control = ControlServer::bind(&config, metrics.clone())
        .map_err(system_error("the control socket"))?;
    let view = configured_view(&config);
    let (migrations, worker_events) =
        Migrations::open(move_config, view.clone(), &config, metrics.clone())
            .map_err(system_error("the records of moves"))?;
    let arrivals = Arrivals::open(&config.node.run_dir, &dataplane, &hold, boot)?;
    let holder = config
        .is_holder()
        .then(|| Holder::new(&dataplane.programs, &config, floor));
    let engine = Engine {
        machine: Handoff::new(machine, view),
        operations: HandoffOperations::default(),
        donations: Donations::new().map_err(other_error)?,
        arrivals,
        recovered: RecoveredFlows::default(),
        private_flows: PrivateFlows::new(&config, migrations.addresses().clone()),
        migrations,
        process_flows: ProcessFlows::default(),
        placement: ClientPlacement::new(&config.services),
        flow_history: FlowHistory::default(),
        holder,
        peers,
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
    let inputs = EventSources {
        peers: peer_events,
        control,
        worker_events,
    };
    Ok((engine, inputs))
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

/// Returns the view of the configured group, which never changes.
fn configured_view(config: &Config) -> View {
    View::configured(config.group.contact, config.nodes().map(|(id, _)| id))
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
/// the stack.
fn attach_dataplane(
    config: &Config,
    interface: &Interface,
) -> Result<(Dataplane, HoldDevice), SetupError> {
    let mut dataplane =
        Dataplane::load(&config.node.bpffs, config.node.capacity).map_err(other_error)?;
    dataplane.set_own_address(config.node.address);
    let hold = HoldDevice::new(HOLD_DEVICE).map_err(other_error)?;
    configure_dataplane(config, interface, &hold, &mut dataplane, false)?;
    dataplane
        .programs
        .attach_interface(interface.index, true)
        .map_err(other_error)?;
    dataplane
        .programs
        .attach_cgroup(&config.node.cgroup().map_err(other_error)?)
        .map_err(other_error)?;
    add_addresses(config, interface)?;
    deliver_private_flows(config)?;
    configure_dataplane(config, interface, &hold, &mut dataplane, true)?;
    Ok((dataplane, hold))
}
