//! The registrar's control API, in a separate thread so that a request delays the event loop only for its answer.

use std::io;
use std::sync::Arc;

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use holdfast_api::control::{
    PeerList, PoolDetail, PoolList, PoolQuery, REGISTRAR_ROUTES, RegistrarStatus, openapi,
};
use holdfast_daemon::control::http_responses::{
    bad_request, method_not_allowed, not_found, response,
};
use holdfast_daemon::control::{metrics_listener, metrics_response, serve};
use holdfast_daemon::socket_path::{SocketPath, SocketPermissions, acquire};
use holdfast_proto::registrar::RegistrarSettings;
use holdfast_sctp::TlsSecurity;
use serde::Serialize;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};

use super::metrics;
use crate::asap_over_tcp::tls_security;
use crate::config::registrar::RegistrarConfig;
use crate::mailbox::{Mailbox, ReplySender, wait_stop_signal};

/// A request to the event loop.
pub(super) enum RegistrarRequest {
    /// Return the registrar's status and counters.
    Status(ReplySender<RegistrarStatus>),
    /// List pools.
    Pools(PoolQuery, ReplySender<PoolList>),
    /// Show one pool.
    Pool(String, ReplySender<PoolDetail>),
    /// List the other registrars.
    Peers(ReplySender<PeerList>),
    /// Use reloaded settings, and certificates if there are any.
    Reload(Box<ReloadedConfig>),
    /// Stop the registrar.
    Stop,
}

/// Mailbox of the registrar's event loop.
pub(super) type RequestMailbox = Mailbox<RegistrarRequest>;

/// Sockets of the API, and the runtime that serves them.
pub(super) struct RegistrarApiServer {
    runtime: tokio::runtime::Runtime,
    path: SocketPath,
}

impl RegistrarApiServer {
    /// Binds the sockets of `config`, and serves them once it [runs](Server::run).
    ///
    /// # Errors
    /// Another daemon has the socket, or an address cannot be listened on.
    pub(super) fn bind(
        config: &RegistrarConfig,
        mailbox: &RequestMailbox,
    ) -> io::Result<RegistrarApiServer> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let inside = runtime.enter();
        let access = SocketPermissions {
            mode: 0o600,
            group: None,
        };
        let bind = |path: &std::path::Path| UnixListener::bind(path);
        let (listener, path) = acquire(&config.control_socket(), access, bind)?;
        runtime.spawn(serve(listener, router(mailbox.clone())));
        if let Some(address) = config.metrics_listen {
            let listener: TcpListener = metrics_listener(address)?;
            runtime.spawn(serve(listener, metrics_only(mailbox.clone())));
        }
        runtime.spawn(stop_on_signal(mailbox.clone()));
        runtime.spawn(reload_on_signal(mailbox.clone(), config.clone()));
        drop(inside);
        Ok(RegistrarApiServer { runtime, path })
    }

    /// Serves until the process ends, in a separate thread.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub(super) fn run(self) -> io::Result<SocketPath> {
        let RegistrarApiServer { runtime, path } = self;
        std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
        Ok(path)
    }
}

async fn stop_on_signal(mailbox: RequestMailbox) {
    wait_stop_signal().await;
    mailbox.send(RegistrarRequest::Stop).await;
}

/// Reloads the configuration file with each SIGHUP. An error in the file leaves the current settings in use.
async fn reload_on_signal(mailbox: RequestMailbox, mut current: RegistrarConfig) {
    let mut hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => hangup,
        Err(error) => {
            tracing::error!(%error, "cannot handle SIGHUP: settings change only at a restart");
            return;
        }
    };
    while hangup.recv().await.is_some() {
        match reload(&current) {
            Ok(Some(reread)) => {
                current.settings = reread.0.clone();
                mailbox
                    .send(RegistrarRequest::Reload(Box::new(reread)))
                    .await;
            }
            Ok(None) => tracing::info!("no configuration file to reload"),
            Err(error) => {
                tracing::error!(%error, "cannot reload the settings: the current ones stay in use")
            }
        }
    }
}

/// Settings, and certificates if there are any.
pub(super) type ReloadedConfig = (RegistrarSettings, Option<Arc<dyn TlsSecurity>>);

/// Returns the file's current settings; `None` if there is no file. TLS can only be enabled or disabled at the start.
fn reload(current: &RegistrarConfig) -> Result<Option<ReloadedConfig>, String> {
    let Some(reloaded) = current.reload().map_err(|error| error.to_string())? else {
        return Ok(None);
    };
    let tls = current.streams.tls.as_ref();
    let tls = tls.and(reloaded.streams.tls.as_ref());
    let security = tls_security(tls).map_err(|error| error.to_string())?;
    Ok(Some((reloaded.settings, security)))
}

/// Returns the router for all of `holdfast_api::control::REGISTRAR_ROUTES`.
fn router(mailbox: RequestMailbox) -> Router {
    let description = async || Json(openapi(REGISTRAR_ROUTES));
    Router::new()
        .route("/v1/registrar", get(status))
        .route("/v1/pools", get(pools))
        .route("/v1/pools/{handle}", get(pool))
        .route("/v1/peers", get(peers))
        .route("/openapi.json", get(description))
        .with_state(mailbox.clone())
        .merge(metrics_only(mailbox))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
}

fn metrics_only(mailbox: RequestMailbox) -> Router {
    Router::new()
        .route("/metrics", get(get_metrics))
        .with_state(mailbox)
}

async fn ask_event_loop<T: Serialize>(
    mailbox: &RequestMailbox,
    request: impl FnOnce(ReplySender<T>) -> RegistrarRequest,
    refused: StatusCode,
) -> Response {
    response(mailbox.ask(request).await, refused)
}

async fn status(State(to): State<RequestMailbox>) -> Response {
    ask_event_loop(&to, RegistrarRequest::Status, StatusCode::CONFLICT).await
}

async fn pools(
    State(to): State<RequestMailbox>,
    query: Result<Query<PoolQuery>, QueryRejection>,
) -> Response {
    let Query(query) = match query {
        Ok(query) => query,
        Err(rejection) => return bad_request(rejection.body_text()).into_response(),
    };
    let request = |reply| RegistrarRequest::Pools(query, reply);
    ask_event_loop(&to, request, StatusCode::BAD_REQUEST).await
}

async fn pool(State(to): State<RequestMailbox>, Path(handle): Path<String>) -> Response {
    let request = |reply| RegistrarRequest::Pool(handle, reply);
    ask_event_loop(&to, request, StatusCode::NOT_FOUND).await
}

async fn peers(State(to): State<RequestMailbox>) -> Response {
    ask_event_loop(&to, RegistrarRequest::Peers, StatusCode::CONFLICT).await
}

async fn get_metrics(State(to): State<RequestMailbox>, headers: HeaderMap) -> Response {
    let status = to.ask(RegistrarRequest::Status).await;
    let peers = to.ask(RegistrarRequest::Peers).await;
    match (status, peers) {
        (Some(Ok(status)), Some(Ok(peers))) => {
            metrics_response(&headers, metrics::encode(&status, &peers))
        }
        (Some(Err(body)), _) | (_, Some(Err(body))) => {
            response::<()>(Some(Err(body)), StatusCode::CONFLICT)
        }
        _ => response::<()>(None, StatusCode::SERVICE_UNAVAILABLE),
    }
}
