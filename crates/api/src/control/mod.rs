//! The control API: HTTP/1.1 with JSON bodies on the daemon's Unix socket.
//!
//! [`ROUTES`] is the table of a node's requests, [`REGISTRAR_ROUTES`] of a registrar's, [`POOL_ROUTES`] of a pool
//! daemon's: the description ([`openapi`]), the client and the daemon's server follow it. Every answer with a status of
//! 400 or above has an [`ErrorBody`].

mod balancing;
mod blame;
#[cfg(feature = "client")]
mod client;
mod flows;
mod handoffs;
mod joining;
mod load;
mod migrations;
mod nodes;
mod openapi;
mod pool_daemon;
mod pools;
mod replication;
mod routes;
mod services;
mod status;

pub use balancing::{
    BalanceLog, BalanceLogEntry, BalancePlan, BalanceRequest, BalanceStatus, DrainReport,
    DrainRequest, DrainState, DrainedProcess, KnownNodeLoad, ManagedProcessEntry, ObstacleEntry,
    PinRequest, PlannedMoveEntry, StuckProcess,
};
pub use blame::Blame;
#[cfg(feature = "client")]
pub use client::{BlockingControlClient, ClientError, ControlClient};
pub use flows::{FlowDetail, FlowEntry, FlowFilter, FlowList, FlowListQuery, FlowState, TcpDetail};
pub use handoffs::{
    FlowOutcome, FlowResult, FlowSelection, HandoffAccepted, HandoffList, HandoffRequest,
    HandoffState, HandoffStatus, HandoffSummary, PhasesUs,
};
pub use joining::{
    NewToken, RevocationEntry, RevocationRequest, RevocationStatus, TOKEN_LIFETIME_S, TokenEntry,
    TokenList, TokenRequest, TokenState,
};
pub use load::{
    LoadReportEntry, LoadReportRequest, LoadWithdrawRequest, LoadWithdrawn, NodeLoadEntry,
    NodeLoadStatus, ProcessLoadEntry,
};
pub use migrations::{
    BlockerEntry, MigrationAccepted, MigrationList, MigrationOutcome, MigrationPhasesUs,
    MigrationRequest, MigrationStatus, MigrationStepUs, MigrationStepsUs, PostCopyMemory,
    ProcessCheck, ProcessCheckQuery, ResidentProcess, RoundEntry, SocketStrategy, UnitEntry,
};
pub use nodes::{
    DropCount, DropList, MembershipChange, MembershipReport, NodeEntry, NodeList, PlacementRequest,
    PlacementWeights, TakeoverRequest, ViewStoreReport,
};
pub use openapi::openapi;
pub use pool_daemon::{
    OwnElement, OwnElementList, PoolDaemonStatus, ReportAccepted, Resolution, ResolveQuery,
    UnreachableReport,
};
pub use pools::{
    ElementEntry, PeerEntry, PeerList, PolicyDetail, PoolDetail, PoolEntry, PoolList, PoolQuery,
    RegistrarCounters, RegistrarStatus,
};
pub use replication::{
    Divergence, DroppedLeg, LegEntry, LegStanding, ReplicationAccepted, ReplicationEntry,
    ReplicationList, ReplicationRequest, ReplicationState,
};
pub use routes::{POOL_ROUTES, REGISTRAR_ROUTES, ROUTES, Route};
pub use services::{
    CheckSettings, FlowPlacementRule, NewService, ServerChecks, ServiceChange,
    ServiceChangeRequest, ServiceChanged, ServiceEntry, ServiceList, ServiceSettings,
    ServiceSource, ServiceUpdate,
};
pub use status::{
    ErrorBody, FlowCounts, HandoffCounts, ProgramStatus, ServerHealth, ServiceNode, ServiceStatus,
    Status,
};

/// Default path of the node daemon's control socket.
pub const SOCKET_PATH: &str = "/run/holdfast/control.sock";

/// Default path of a registrar's control socket.
pub const REGISTRAR_SOCKET_PATH: &str = "/run/holdfast/registrar.sock";

/// Default path of a pool daemon's control socket.
pub const POOL_SOCKET_PATH: &str = "/run/holdfast/pool.sock";
