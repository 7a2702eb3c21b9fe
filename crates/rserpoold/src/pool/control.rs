//! Routes of the pool daemon's control API.

use axum::Router;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use holdfast_api::control::{POOL_ROUTES, ResolveQuery, UnreachableReport, openapi};
use holdfast_daemon::control::http_responses::{
    bad_request, method_not_allowed, not_found, response,
};
use serde::Serialize;

use super::requests::PoolRequest;
use crate::mailbox::{Mailbox, ReplySender};

type RequestMailbox = Mailbox<PoolRequest>;

/// Returns the router for all of [`POOL_ROUTES`].
pub(super) fn router(mailbox: RequestMailbox) -> Router {
    let description = async || Json(openapi(POOL_ROUTES));
    Router::new()
        .route("/v1/pool", get(status))
        .route("/v1/elements", get(elements))
        .route("/v1/resolve/{handle}", get(resolve))
        .route("/v1/select/{handle}", get(select))
        .route("/v1/unreachable", post(unreachable))
        .route("/openapi.json", get(description))
        .with_state(mailbox)
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
}

async fn ask_event_loop<T: Serialize>(
    mailbox: &RequestMailbox,
    request: impl FnOnce(ReplySender<T>) -> PoolRequest,
    refused: StatusCode,
) -> Response {
    response(mailbox.ask(request).await, refused)
}

async fn status(State(to): State<RequestMailbox>) -> Response {
    ask_event_loop(&to, PoolRequest::Status, StatusCode::CONFLICT).await
}

async fn elements(State(to): State<RequestMailbox>) -> Response {
    ask_event_loop(&to, PoolRequest::Elements, StatusCode::CONFLICT).await
}

async fn resolve(
    State(to): State<RequestMailbox>,
    Path(handle): Path<String>,
    query: Result<Query<ResolveQuery>, QueryRejection>,
) -> Response {
    let Query(query) = match query {
        Ok(query) => query,
        Err(rejection) => return bad_request(rejection.body_text()).into_response(),
    };
    let request = |reply| PoolRequest::Resolve(handle, query, reply);
    ask_event_loop(&to, request, StatusCode::NOT_FOUND).await
}

async fn select(State(to): State<RequestMailbox>, Path(handle): Path<String>) -> Response {
    let request = |reply| PoolRequest::Select(handle, reply);
    ask_event_loop(&to, request, StatusCode::NOT_FOUND).await
}

async fn unreachable(
    State(to): State<RequestMailbox>,
    body: Result<Json<UnreachableReport>, JsonRejection>,
) -> Response {
    let Json(report) = match body {
        Ok(report) => report,
        Err(rejection) => return bad_request(rejection.body_text()).into_response(),
    };
    let request = |reply| PoolRequest::Unreachable(report, reply);
    ask_event_loop(&to, request, StatusCode::NOT_FOUND).await
}
