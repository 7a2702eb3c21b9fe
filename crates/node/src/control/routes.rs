//! Routes of the control API: conversion of HTTP to requests and back.

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{
    ConnectInfo, DefaultBodyLimit, FromRequest, FromRequestParts, Path, Query, Request, State,
};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use holdfast_api::FlowText;
use holdfast_api::control::{
    BalanceRequest, DrainRequest, FlowListQuery, HandoffRequest, LoadReportRequest,
    LoadWithdrawRequest, MigrationRequest, MigrationStatus, PinRequest, PlacementRequest,
    ProcessCheckQuery, ROUTES, ReplicationRequest, RevocationRequest, ServiceChangeRequest,
    TakeoverRequest, TokenRequest, openapi,
};
use holdfast_daemon::control::http_responses::{
    ErrorResponse, bad_request, error_body, method_not_allowed, not_found, response,
};
use holdfast_daemon::control::{SocketUser, metrics_response};
use holdfast_wire::drain_frames::DrainOrder;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, oneshot};

use super::{ControlRequest, ReplySender};
use crate::membership::OperatorRequest;
use crate::metrics::Metrics;

/// Maximum length of a body: a handoff may name tens of thousands of flows, at up to 100 bytes each.
const BODY_BYTES_MAX: usize = 16 << 20;

type RequestSender = mpsc::Sender<ControlRequest>;
type EngineState = State<RequestSender>;

/// Returns the router for all of `holdfast_api::control::ROUTES`.
pub(super) fn router(engine: RequestSender, metrics: Metrics) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/flows", get(flows))
        .route("/v1/flows/{flow}", get(flow))
        .route("/v1/handoffs", get(handoffs).post(start_handoff))
        .route("/v1/handoffs/{id}", get(handoff))
        .merge(migration_routes())
        .merge(balancing_routes())
        .merge(joining_routes())
        .merge(membership_routes())
        .merge(load_routes())
        .route("/v1/nodes", get(nodes))
        .route("/v1/drops", get(drops))
        .route("/v1/placement", get(placement).post(set_placement))
        .route("/v1/services", get(services).post(change_services))
        .route("/openapi.json", get(async || Json(openapi(ROUTES))))
        .merge(replication_routes())
        .merge(test_routes())
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(engine)
        .merge(metrics_only(metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
}

/// Returns the routes for tests; none in a build without them.
fn test_routes() -> Router<RequestSender> {
    #[cfg(feature = "test-faults")]
    return Router::new().route("/test/view", post(set_test_view));
    #[cfg(not(feature = "test-faults"))]
    Router::new()
}

#[cfg(feature = "test-faults")]
async fn set_test_view(
    State(engine): EngineState,
    JsonBody(body): JsonBody<crate::control::TestView>,
) -> Response {
    let request = |reply| ControlRequest::TestView(body, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

/// Returns the routes about processes.
fn migration_routes() -> Router<RequestSender> {
    Router::new()
        .route("/v1/units/{unit}", get(unit))
        .route("/v1/processes/{pid}/check", get(check))
        .route("/v1/migrations", get(migrations).post(start_migration))
        .route("/v1/migrations/{id}", get(migration))
        .route("/v1/migrations/{id}/cancel", post(cancel_migration))
}

/// Returns the routes about the conductor.
fn balancing_routes() -> Router<RequestSender> {
    Router::new()
        .route("/v1/drain", get(drain_report).post(drain))
        .route("/v1/undrain", post(undrain))
        .route(
            "/v1/nodes/{name}/drain",
            get(node_drain_report).post(drain_node),
        )
        .route("/v1/nodes/{name}/undrain", post(undrain_node))
        .route("/v1/balance", get(balance).post(set_balancing))
        .route("/v1/balance/pins", post(pin))
        .route("/v1/balance/now", post(balance_now))
        .route("/v1/balance/plan", get(balance_plan))
        .route("/v1/balance/log", get(balance_log))
}

/// Returns the routes about join tokens and revocation lists.
fn joining_routes() -> Router<RequestSender> {
    Router::new()
        .route("/v1/tokens", get(tokens).post(make_token))
        .route("/v1/tokens/{id}/revoke", post(revoke_token))
        .route(
            "/v1/revocations",
            get(revocations).post(publish_revocations),
        )
}

/// Returns the routes that change the membership of the group.
fn membership_routes() -> Router<RequestSender> {
    Router::new()
        .route("/v1/group/leave", post(leave))
        .route("/v1/group/takeover", post(force_takeover))
        .route("/v1/nodes/{name}/remove", post(remove_node))
        .route("/v1/nodes/{name}/promote", post(promote_node))
}

/// Returns the routes about replicated services.
fn replication_routes() -> Router<RequestSender> {
    Router::new().route(
        "/v1/replications",
        get(replications).post(change_replication),
    )
}

/// Returns the routes about load.
fn load_routes() -> Router<RequestSender> {
    Router::new()
        .route("/v1/load", get(load))
        .route("/v1/load/reports", post(report_load))
        .route("/v1/load/withdraw", post(withdraw_load))
}

/// Returns the router for `/metrics` alone.
pub(super) fn metrics_only(metrics: Metrics) -> Router {
    let answer = async move |headers: HeaderMap| metrics_response(&headers, metrics.encode());
    Router::new().route("/metrics", get(answer))
}

async fn status(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Status, StatusCode::CONFLICT).await
}

async fn flows(State(engine): EngineState, UrlQuery(query): UrlQuery<FlowListQuery>) -> Response {
    let request = |reply| ControlRequest::Flows(query, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn flow(State(engine): EngineState, Path(text): Path<String>) -> Response {
    let flow: FlowText = match text.parse() {
        Ok(flow) => flow,
        Err(error) => return bad_request(format!("`{text}`: {error}")).into_response(),
    };
    let request = |reply| ControlRequest::Flow(flow, reply);
    ask_engine(&engine, request, StatusCode::NOT_FOUND).await
}

async fn start_handoff(
    State(engine): EngineState,
    JsonBody(body): JsonBody<HandoffRequest>,
) -> Response {
    let request = |reply| ControlRequest::StartHandoff(body, reply);
    let answer = ask_engine(&engine, request, StatusCode::CONFLICT).await;
    match answer.status() {
        StatusCode::OK => (StatusCode::ACCEPTED, answer).into_response(),
        _ => answer,
    }
}

async fn handoffs(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Handoffs, StatusCode::CONFLICT).await
}

async fn handoff(State(engine): EngineState, Path(text): Path<String>) -> Response {
    let Ok(id) = text.parse() else {
        return bad_request(format!("`{text}` is not the number of a handoff")).into_response();
    };
    let request = |reply| ControlRequest::Handoff(id, reply);
    ask_engine(&engine, request, StatusCode::NOT_FOUND).await
}

async fn unit(State(engine): EngineState, Path(name): Path<String>) -> Response {
    let request = |reply| ControlRequest::Unit(name, reply);
    ask_engine(&engine, request, StatusCode::NOT_FOUND).await
}

async fn check(
    State(engine): EngineState,
    Path(text): Path<String>,
    UrlQuery(query): UrlQuery<ProcessCheckQuery>,
) -> Response {
    let Ok(pid) = text.parse() else {
        return bad_request(format!("`{text}` is not a PID")).into_response();
    };
    let request = |reply| ControlRequest::Check(pid, query, reply);
    ask_engine(&engine, request, StatusCode::NOT_FOUND).await
}

async fn start_migration(
    State(engine): EngineState,
    JsonBody(body): JsonBody<MigrationRequest>,
) -> Response {
    let request = |reply| ControlRequest::StartMigration(body, reply);
    let answer = ask_engine(&engine, request, StatusCode::CONFLICT).await;
    match answer.status() {
        StatusCode::OK => (StatusCode::ACCEPTED, answer).into_response(),
        _ => answer,
    }
}

async fn migrations(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Migrations, StatusCode::CONFLICT).await
}

async fn migration(State(engine): EngineState, Path(text): Path<String>) -> Response {
    ask_about_migration(&engine, &text, ControlRequest::Migration).await
}

async fn cancel_migration(State(engine): EngineState, Path(text): Path<String>) -> Response {
    ask_about_migration(&engine, &text, ControlRequest::CancelMigration).await
}

async fn ask_about_migration(
    engine: &RequestSender,
    text: &str,
    request: fn(u64, ReplySender<MigrationStatus>) -> ControlRequest,
) -> Response {
    let Ok(id) = text.parse() else {
        return bad_request(format!("`{text}` is not the number of a migration")).into_response();
    };
    ask_engine(engine, |reply| request(id, reply), StatusCode::NOT_FOUND).await
}

async fn drain(State(engine): EngineState, JsonBody(body): JsonBody<DrainRequest>) -> Response {
    let request = |reply| ControlRequest::Drain(body, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn drain_report(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::DrainReport, StatusCode::CONFLICT).await
}

async fn undrain(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Undrain, StatusCode::CONFLICT).await
}

async fn drain_node(
    State(engine): EngineState,
    Path(name): Path<String>,
    JsonBody(body): JsonBody<DrainRequest>,
) -> Response {
    let deadline_s = body.deadline_s;
    order_drain(&engine, name, DrainOrder::Begin { deadline_s }).await
}

async fn node_drain_report(State(engine): EngineState, Path(name): Path<String>) -> Response {
    order_drain(&engine, name, DrainOrder::Report).await
}

async fn undrain_node(State(engine): EngineState, Path(name): Path<String>) -> Response {
    order_drain(&engine, name, DrainOrder::End).await
}

async fn order_drain(engine: &RequestSender, name: String, order: DrainOrder) -> Response {
    let request = |reply| ControlRequest::NodeDrain(name, order, reply);
    ask_engine(engine, request, StatusCode::CONFLICT).await
}

async fn balance(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Balance, StatusCode::CONFLICT).await
}

async fn set_balancing(
    State(engine): EngineState,
    JsonBody(body): JsonBody<BalanceRequest>,
) -> Response {
    let request = |reply| ControlRequest::SetBalancing(body.on, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn pin(State(engine): EngineState, JsonBody(body): JsonBody<PinRequest>) -> Response {
    let request = |reply| ControlRequest::Pin(body, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn balance_now(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::BalanceNow, StatusCode::CONFLICT).await
}

async fn balance_plan(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::BalancePlan, StatusCode::CONFLICT).await
}

async fn balance_log(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::BalanceLog, StatusCode::CONFLICT).await
}

async fn nodes(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Nodes, StatusCode::CONFLICT).await
}

async fn leave(State(engine): EngineState) -> Response {
    let request = |reply| ControlRequest::Membership(OperatorRequest::Leave, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn force_takeover(
    State(engine): EngineState,
    JsonBody(body): JsonBody<TakeoverRequest>,
) -> Response {
    if !body.force {
        let error = "a takeover without a majority needs \"force\": true".to_owned();
        return bad_request(error).into_response();
    }
    let request = |reply| ControlRequest::Membership(OperatorRequest::ForceTakeover, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn remove_node(State(engine): EngineState, Path(name): Path<String>) -> Response {
    let request = |reply| ControlRequest::Membership(OperatorRequest::Remove(name), reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn promote_node(State(engine): EngineState, Path(name): Path<String>) -> Response {
    let request = |reply| ControlRequest::Membership(OperatorRequest::Promote(name), reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn load(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Load, StatusCode::CONFLICT).await
}

async fn report_load(
    State(engine): EngineState,
    ConnectInfo(user): ConnectInfo<SocketUser>,
    JsonBody(body): JsonBody<LoadReportRequest>,
) -> Response {
    let request = |reply| ControlRequest::ReportLoad(body, user.uid, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn withdraw_load(
    State(engine): EngineState,
    ConnectInfo(user): ConnectInfo<SocketUser>,
    JsonBody(body): JsonBody<LoadWithdrawRequest>,
) -> Response {
    let request = |reply| ControlRequest::WithdrawLoad(body, user.uid, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn drops(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Drops, StatusCode::CONFLICT).await
}

async fn placement(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Placement, StatusCode::CONFLICT).await
}

async fn set_placement(
    State(engine): EngineState,
    ConnectInfo(user): ConnectInfo<SocketUser>,
    JsonBody(body): JsonBody<PlacementRequest>,
) -> Response {
    let request = |reply| ControlRequest::SetPlacement(body, user.uid, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn services(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Services, StatusCode::CONFLICT).await
}

async fn change_services(
    State(engine): EngineState,
    ConnectInfo(user): ConnectInfo<SocketUser>,
    JsonBody(body): JsonBody<ServiceChangeRequest>,
) -> Response {
    let request = |reply| ControlRequest::ChangeServices(body, user.uid, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn replications(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Replications, StatusCode::CONFLICT).await
}

async fn change_replication(
    State(engine): EngineState,
    ConnectInfo(user): ConnectInfo<SocketUser>,
    JsonBody(body): JsonBody<ReplicationRequest>,
) -> Response {
    let request = |reply| ControlRequest::ChangeReplication(body, user.uid, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn tokens(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Tokens, StatusCode::CONFLICT).await
}

async fn make_token(
    State(engine): EngineState,
    JsonBody(body): JsonBody<TokenRequest>,
) -> Response {
    let request = |reply| ControlRequest::NewToken(body, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

async fn revoke_token(State(engine): EngineState, Path(id): Path<String>) -> Response {
    let request = |reply| ControlRequest::RevokeToken(id, reply);
    ask_engine(&engine, request, StatusCode::NOT_FOUND).await
}

async fn revocations(State(engine): EngineState) -> Response {
    ask_engine(&engine, ControlRequest::Revocations, StatusCode::CONFLICT).await
}

async fn publish_revocations(
    State(engine): EngineState,
    JsonBody(body): JsonBody<RevocationRequest>,
) -> Response {
    let request = |reply| ControlRequest::PublishRevocations(body, reply);
    ask_engine(&engine, request, StatusCode::CONFLICT).await
}

/// Passes a request to the engine. A refusal has the status `refused`.
async fn ask_engine<T: Serialize>(
    engine: &RequestSender,
    request: impl FnOnce(ReplySender<T>) -> ControlRequest,
    refused: StatusCode,
) -> Response {
    let (reply, answer) = oneshot::channel();
    let sent = engine.send(request(reply)).await;
    let answer = match sent {
        Ok(()) => answer.await.ok(),
        Err(_) => None,
    };
    response(answer, refused)
}

/// A JSON body, regardless of its content type.
struct JsonBody<T>(T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = ErrorResponse;

    async fn from_request(request: Request, state: &S) -> Result<Self, ErrorResponse> {
        let bytes = Bytes::from_request(request, state).await;
        let bytes = bytes.map_err(|rejection| {
            ErrorResponse(rejection.status(), error_body(rejection.body_text()))
        })?;
        let body = serde_json::from_slice(&bytes);
        body.map(JsonBody)
            .map_err(|error| bad_request(format!("cannot parse the body: {error}")))
    }
}

/// The query of a URL.
struct UrlQuery<T>(T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for UrlQuery<T> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ErrorResponse> {
        let query = Query::from_request_parts(parts, state).await;
        let refuse = |rejection: QueryRejection| bad_request(rejection.body_text());
        query.map(|Query(query)| UrlQuery(query)).map_err(refuse)
    }
}
