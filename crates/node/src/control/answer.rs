//! Answers of the control API, whoever serves it.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use holdfast_api::control::ErrorBody;
use serde::Serialize;

/// The content type of OpenMetrics, which `prometheus-client` writes.
pub(crate) const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// An answer that is not the wanted one.
pub(crate) struct Refusal(pub(super) StatusCode, pub(super) ErrorBody);

/// The answer of the daemon's other part: what it refuses has the status `refused`; none if that part is gone.
pub(crate) fn response<T: Serialize>(
    answer: Option<Result<T, ErrorBody>>,
    refused: StatusCode,
) -> Response {
    match answer {
        Some(Ok(answer)) => Json(answer).into_response(),
        Some(Err(body)) => Refusal(refused, body).into_response(),
        None => Refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            ErrorBody {
                error: "the daemon is stopping".to_owned(),
                what_to_do: "ask again when it has been started".to_owned(),
            },
        )
        .into_response(),
    }
}

/// The answer where there is no such path.
pub(crate) async fn unknown() -> Refusal {
    let error = "there is no such path".to_owned();
    Refusal(StatusCode::NOT_FOUND, body_of(error))
}

/// The answer where the path has no such method.
pub(crate) async fn wrong_method() -> Refusal {
    let error = "the path has no such method".to_owned();
    Refusal(StatusCode::METHOD_NOT_ALLOWED, body_of(error))
}

/// The request makes no sense.
pub(crate) fn bad_request(error: String) -> Refusal {
    Refusal(StatusCode::BAD_REQUEST, body_of(error))
}

/// An error's body that points to the description.
pub(super) fn body_of(error: String) -> ErrorBody {
    ErrorBody {
        error,
        what_to_do: "GET /openapi.json describes every request".to_owned(),
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}
