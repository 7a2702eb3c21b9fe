//! The tables of the control API's requests.

use schemars::{Schema, SchemaGenerator};

use super::{
    BalanceLog, BalancePlan, BalanceRequest, BalanceStatus, DrainReport, DrainRequest, DropList,
    FlowDetail, FlowList, FlowListQuery, HandoffAccepted, HandoffList, HandoffRequest,
    HandoffStatus, LoadReportEntry, LoadReportRequest, LoadWithdrawRequest, LoadWithdrawn,
    MembershipChange, MigrationAccepted, MigrationList, MigrationRequest, MigrationStatus,
    NewToken, NodeList, NodeLoadStatus, OwnElementList, PeerList, PinRequest, PlacementRequest,
    PlacementWeights, PoolDaemonStatus, PoolDetail, PoolList, PoolQuery, ProcessCheck,
    ProcessCheckQuery, RegistrarStatus, ReplicationAccepted, ReplicationList, ReplicationRequest,
    ReportAccepted, Resolution, ResolveQuery, RevocationRequest, RevocationStatus,
    ServiceChangeRequest, ServiceChanged, ServiceList, Status, TakeoverRequest, TokenEntry,
    TokenList, TokenRequest, UnitEntry, UnreachableReport,
};

/// One request that the daemon answers.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// `GET` or `POST`.
    pub method: &'static str,
    /// The path, with `{name}` for a part that varies.
    pub path: &'static str,
    /// One sentence of description.
    pub summary: &'static str,
    /// Schema of the query, a type with the query's parameters as fields.
    pub query: Option<fn(&mut SchemaGenerator) -> Schema>,
    /// Schema of the request's body.
    pub body: Option<fn(&mut SchemaGenerator) -> Schema>,
    /// Status of success.
    pub status: u16,
    /// Schema of the answer; none for plain text.
    pub answer: Option<fn(&mut SchemaGenerator) -> Schema>,
}

fn schema<T: schemars::JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// Schema of any JSON object: the description itself.
fn any_object(_: &mut SchemaGenerator) -> Schema {
    schemars::json_schema!({"type": "object"})
}

const GET: Route = Route {
    method: "GET",
    path: "",
    summary: "",
    query: None,
    body: None,
    status: 200,
    answer: None,
};

/// All requests that a node's daemon answers.
pub const ROUTES: &[Route] = &[
    Route {
        path: "/v1/status",
        summary: "Status of this node.",
        answer: Some(schema::<Status>),
        ..GET
    },
    Route {
        path: "/v1/flows",
        summary: "The flows this node knows.",
        query: Some(schema::<FlowListQuery>),
        answer: Some(schema::<FlowList>),
        ..GET
    },
    Route {
        path: "/v1/flows/{flow}",
        summary: "One flow, with the state of its socket.",
        answer: Some(schema::<FlowDetail>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/handoffs",
        summary: "Hand flows that this node owns to another node.",
        body: Some(schema::<HandoffRequest>),
        status: 202,
        answer: Some(schema::<HandoffAccepted>),
        ..GET
    },
    Route {
        path: "/v1/handoffs",
        summary: "The handoffs the daemon remembers.",
        answer: Some(schema::<HandoffList>),
        ..GET
    },
    Route {
        path: "/v1/handoffs/{id}",
        summary: "Progress and result of one handoff.",
        answer: Some(schema::<HandoffStatus>),
        ..GET
    },
    Route {
        path: "/v1/units/{unit}",
        summary: "The main process of a systemd unit, found by its control group.",
        answer: Some(schema::<UnitEntry>),
        ..GET
    },
    Route {
        path: "/v1/processes/{pid}/check",
        summary: "Check whether a process of this node can move, and list what prevents it.",
        query: Some(schema::<ProcessCheckQuery>),
        answer: Some(schema::<ProcessCheck>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/migrations",
        summary: "Move a process of this node, with all its children, to another node.",
        body: Some(schema::<MigrationRequest>),
        status: 202,
        answer: Some(schema::<MigrationAccepted>),
        ..GET
    },
    Route {
        path: "/v1/migrations",
        summary: "The migrations from this node that the daemon remembers.",
        answer: Some(schema::<MigrationList>),
        ..GET
    },
    Route {
        path: "/v1/migrations/{id}",
        summary: "Progress and result of one migration.",
        answer: Some(schema::<MigrationStatus>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/migrations/{id}/cancel",
        summary: "Cancel a migration, which has no effect once it is committed. The answer may still be `running`.",
        answer: Some(schema::<MigrationStatus>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/drain",
        summary: "Move everything off this node, and take nothing. The answer comes at once; `GET` has the progress.",
        body: Some(schema::<DrainRequest>),
        answer: Some(schema::<DrainReport>),
        ..GET
    },
    Route {
        path: "/v1/drain",
        summary: "Progress of the drain of this node.",
        answer: Some(schema::<DrainReport>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/undrain",
        summary: "End the drain of this node: it takes processes and clients again.",
        answer: Some(schema::<DrainReport>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/nodes/{name}/drain",
        summary: "Drain a node: this one, or at the contact node any other, which answers itself.",
        body: Some(schema::<DrainRequest>),
        answer: Some(schema::<DrainReport>),
        ..GET
    },
    Route {
        path: "/v1/nodes/{name}/drain",
        summary: "Progress of the drain of a node: this one, or at the contact node any other.",
        answer: Some(schema::<DrainReport>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/nodes/{name}/undrain",
        summary: "End the drain of a node: this one, or at the contact node any other.",
        answer: Some(schema::<DrainReport>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/balance/pins",
        summary: "Pin a process to this node, or free it.",
        body: Some(schema::<PinRequest>),
        answer: Some(schema::<BalanceStatus>),
        ..GET
    },
    Route {
        path: "/v1/balance",
        summary: "Loads of the group as this node knows them, and its managed processes.",
        answer: Some(schema::<BalanceStatus>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/balance",
        summary: "Switch the balancing of loads on or off at this node.",
        body: Some(schema::<BalanceRequest>),
        answer: Some(schema::<BalanceStatus>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/balance/now",
        summary: "Decide at once, and begin the move that evens out loads, if there is one.",
        answer: Some(schema::<BalancePlan>),
        ..GET
    },
    Route {
        path: "/v1/balance/plan",
        summary: "What this node would do now to even out loads, and why.",
        answer: Some(schema::<BalancePlan>),
        ..GET
    },
    Route {
        path: "/v1/balance/log",
        summary: "The latest decisions of this node's conductor.",
        answer: Some(schema::<BalanceLog>),
        ..GET
    },
    Route {
        path: "/v1/nodes",
        summary: "The nodes of the group.",
        answer: Some(schema::<NodeList>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/group/leave",
        summary: "Let this node leave its group; a contact node hands its role over first.",
        answer: Some(schema::<MembershipChange>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/group/takeover",
        summary: "Make this voter the contact node although a majority of the voters is lost for good.",
        body: Some(schema::<TakeoverRequest>),
        answer: Some(schema::<MembershipChange>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/nodes/{name}/remove",
        summary: "Remove a node from the group, at the contact node.",
        answer: Some(schema::<MembershipChange>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/nodes/{name}/promote",
        summary: "Make a backup the contact node, at the contact node.",
        answer: Some(schema::<MembershipChange>),
        ..GET
    },
    Route {
        path: "/v1/load",
        summary: "The load of this node and of its processes.",
        answer: Some(schema::<NodeLoadStatus>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/load/reports",
        summary: "Report a load that only a program itself knows. The report ends unless it is repeated.",
        body: Some(schema::<LoadReportRequest>),
        answer: Some(schema::<LoadReportEntry>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/load/withdraw",
        summary: "Withdraw a reported load.",
        body: Some(schema::<LoadWithdrawRequest>),
        answer: Some(schema::<LoadWithdrawn>),
        ..GET
    },
    Route {
        path: "/v1/drops",
        summary: "Packets the data plane dropped, by reason.",
        answer: Some(schema::<DropList>),
        ..GET
    },
    Route {
        path: "/v1/placement",
        summary: "The weights for placing new flows.",
        answer: Some(schema::<PlacementWeights>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/placement",
        summary: "Change the weights for placing new flows.",
        body: Some(schema::<PlacementRequest>),
        answer: Some(schema::<PlacementWeights>),
        ..GET
    },
    Route {
        path: "/v1/services",
        summary: "The services of the group.",
        answer: Some(schema::<ServiceList>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/services",
        summary: "Change the services of the group, at any of its nodes. Existing flows stay where they are.",
        body: Some(schema::<ServiceChangeRequest>),
        answer: Some(schema::<ServiceChanged>),
        ..GET
    },
    Route {
        path: "/v1/replications",
        summary: "The replicated services.",
        answer: Some(schema::<ReplicationList>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/replications",
        summary: "Begin to replicate a service, make a replica the primary, or stop; at the contact node.",
        body: Some(schema::<ReplicationRequest>),
        answer: Some(schema::<ReplicationAccepted>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/tokens",
        summary: "Make a token with which one host can join the group.",
        body: Some(schema::<TokenRequest>),
        answer: Some(schema::<NewToken>),
        ..GET
    },
    Route {
        path: "/v1/tokens",
        summary: "The join tokens of this node.",
        answer: Some(schema::<TokenList>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/tokens/{id}/revoke",
        summary: "Revoke a join token. A certificate that it has brought stays valid.",
        answer: Some(schema::<TokenEntry>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/revocations",
        summary: "Put a revocation list in force at all nodes of the group.",
        body: Some(schema::<RevocationRequest>),
        answer: Some(schema::<RevocationStatus>),
        ..GET
    },
    Route {
        path: "/v1/revocations",
        summary: "The revocation lists in force at this node.",
        answer: Some(schema::<RevocationStatus>),
        ..GET
    },
    OPENAPI_ROUTE,
    METRICS,
];

const OPENAPI_ROUTE: Route = Route {
    path: "/openapi.json",
    summary: "This OpenAPI description.",
    answer: Some(any_object),
    ..GET
};

const METRICS: Route = Route {
    path: "/metrics",
    summary: "Metrics, in OpenMetrics or Prometheus' text format, as the request accepts.",
    ..GET
};

/// All requests that a registrar answers.
pub const REGISTRAR_ROUTES: &[Route] = &[
    Route {
        path: "/v1/registrar",
        summary: "Status of this registrar.",
        answer: Some(schema::<RegistrarStatus>),
        ..GET
    },
    Route {
        path: "/v1/pools",
        summary: "The pools of the scope.",
        query: Some(schema::<PoolQuery>),
        answer: Some(schema::<PoolList>),
        ..GET
    },
    Route {
        path: "/v1/pools/{handle}",
        summary: "One pool with its elements.",
        answer: Some(schema::<PoolDetail>),
        ..GET
    },
    Route {
        path: "/v1/peers",
        summary: "The other registrars of the scope.",
        answer: Some(schema::<PeerList>),
        ..GET
    },
    OPENAPI_ROUTE,
    METRICS,
];

/// All requests that a pool daemon answers.
pub const POOL_ROUTES: &[Route] = &[
    Route {
        path: "/v1/pool",
        summary: "Status of this pool daemon.",
        answer: Some(schema::<PoolDaemonStatus>),
        ..GET
    },
    Route {
        path: "/v1/elements",
        summary: "The elements that programs of this host have registered.",
        answer: Some(schema::<OwnElementList>),
        ..GET
    },
    Route {
        path: "/v1/resolve/{handle}",
        summary: "Elements of a pool, in the registrar's order.",
        query: Some(schema::<ResolveQuery>),
        answer: Some(schema::<Resolution>),
        ..GET
    },
    Route {
        path: "/v1/select/{handle}",
        summary: "One element of a pool, chosen by its policy; a cached answer of the last seconds may be used.",
        answer: Some(schema::<Resolution>),
        ..GET
    },
    Route {
        method: "POST",
        path: "/v1/unreachable",
        summary: "Report that an element named by the daemon could not be reached.",
        body: Some(schema::<UnreachableReport>),
        answer: Some(schema::<ReportAccepted>),
        ..GET
    },
    OPENAPI_ROUTE,
];
